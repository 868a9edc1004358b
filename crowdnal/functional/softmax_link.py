"""Softmax link: cross-entropy of softmax(scores_i W_r [+ shared_i]), the loss of CrowdLayer, CoNAL and CCC.

One op forward, one backward; the backward is a Function too, whose own derivative is written with the primitives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crowdnal import ops, reference
from crowdnal.functional._common import Fold, OpFunction, add, call, save
from crowdnal.functional.mix import mix, mix_annotators, mix_items, sum_by_item

_ops = torch.ops.crowdnal


class SoftmaxLink(OpFunction):
    """(loss [], nll [nnz], probs [nnz, K]); see `crowdnal.reference.softmax_link`."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        """The fused op."""
        return call(_ops.softmax_link.default, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps inputs and outputs only, so that second order is exact."""
        _, nll, probs = output
        ctx.mark_non_differentiable(probs)
        ctx.set_materialize_grads(False)
        save(ctx, *inputs[:9], nll, probs, forward=9)
        ctx.mean = inputs[9]

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_nll: Tensor | None, _: Tensor | None) -> Any:
        """One fused op; the gradient of a weight is the nll it multiplies."""
        *inputs, nll, probs = ctx.saved_tensors
        needs, need_weight = ctx.needs_input_grad[:3], ctx.needs_input_grad[3]
        if grad_loss is None and grad_nll is None:
            return (None,) * 10
        arguments = (grad_loss, grad_nll, *inputs, probs, ctx.mean, *needs)
        if torch.compiler.is_compiling():
            grads = _ops.softmax_link_backward(*arguments)
        else:
            grads = SoftmaxLinkBackward.run(*arguments)
        dweight = None
        if need_weight and grad_loss is not None:
            dweight = reference.upstream(grad_loss, None, None, nll, ctx.mean) * nll
        return (*(g if need else None for g, need in zip(grads, needs, strict=True)), dweight, *[None] * 6)

    @staticmethod
    def jvp(ctx: Any, scores_t: Any, confusion_t: Any, shared_t: Any, weight_t: Any, *rest: Any) -> Any:
        """d nll = (softmax(h) - onehot) . dh."""
        scores, confusion, shared, weight, *index, label = ctx.saved_tensors
        _, nll, probs = _unfused(scores, confusion, shared, weight, *index, label, ctx.mean)
        h_t = _tangent(scores, confusion, scores_t, confusion_t, shared_t, index)
        nll_t = torch.zeros_like(nll) if h_t is None else (reference.residual(probs, label) * h_t).sum(1)
        total_t = reference.reduce(nll_t, weight, ctx.mean)
        if weight_t is not None:
            total_t = total_t + reference.reduce(nll, weight_t, ctx.mean)
        return total_t, nll_t, None


class SoftmaxLinkBackward(OpFunction):
    """Gradients of `SoftmaxLink` for scores, confusion and shared; of no use where a `need_` is False."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        """The fused op."""
        return call(_ops.softmax_link_backward.default, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the inputs, not `probs`: it is a function of them."""
        ctx.set_materialize_grads(False)
        save(ctx, *inputs[:11], forward=11)
        ctx.mean, *ctx.needs = inputs[12:]

    @staticmethod
    def backward(ctx: Any, scores_c: Any, confusion_c: Any, shared_c: Any) -> Any:
        """Derivative of sum_n u_n (softmax(h_n) - onehot) . dh_n, dh the change of h along the cotangents."""
        grad_loss, grad_nll, scores, confusion, shared, weight, *index, label = ctx.saved_tensors
        cotangents = (c if need else None for c, need in zip((scores_c, confusion_c, shared_c), ctx.needs, strict=True))
        scores_c, confusion_c, shared_c = cotangents
        h_c = _tangent(scores, confusion, scores_c, confusion_c, shared_c, index)
        if h_c is None:
            return (None,) * 16
        _, _, probs = _unfused(scores, confusion, shared, weight, *index, label, ctx.mean)
        u = reference.upstream(grad_loss, grad_nll, weight, probs, ctx.mean)
        residual = reference.residual(probs, label)
        dscores, dconfusion, dshared = _second_order(
            scores, confusion, index, u.unsqueeze(1) * residual, _curvature(u, probs, h_c),
            scores_c, confusion_c, ctx.needs_input_grad[2:5],
        )  # fmt: skip
        du = (residual * h_c).sum(1)
        dgrad_loss = None if grad_loss is None else reference.reduce(du, weight, ctx.mean)
        dweight = None
        if weight is not None and grad_loss is not None:
            dweight = reference.upstream(grad_loss, None, None, du, ctx.mean) * du
        dgrad_nll = None if grad_nll is None else du
        return dgrad_loss, dgrad_nll, dscores, dconfusion, dshared, dweight, *[None] * 10

    @staticmethod
    def jvp(
        ctx: Any,
        loss_t: Any,
        nll_t: Any,
        scores_t: Any,
        confusion_t: Any,
        shared_t: Any,
        weight_t: Any,
        *rest: Any,
    ) -> Any:
        """The same second derivative, along the tangents."""
        grad_loss, grad_nll, scores, confusion, shared, weight, *index, label = ctx.saved_tensors
        _, _, probs = _unfused(scores, confusion, shared, weight, *index, label, ctx.mean)
        u = reference.upstream(grad_loss, grad_nll, weight, probs, ctx.mean)
        u_t = reference.upstream(loss_t, nll_t, weight, probs, ctx.mean)
        if weight_t is not None:
            u_t = u_t + reference.upstream(grad_loss, None, weight_t, probs, ctx.mean)
        residual = reference.residual(probs, label)
        q = u_t.unsqueeze(1) * residual
        h_t = _tangent(scores, confusion, scores_t, confusion_t, shared_t, index)
        if h_t is not None:
            q = q + _curvature(u, probs, h_t)
        out = _second_order(
            scores, confusion, index, u.unsqueeze(1) * residual, q, scores_t, confusion_t, ctx.needs
        )  # fmt: skip
        empty = (
            scores.new_zeros(0, scores.shape[1]),
            confusion.new_zeros(0, *confusion.shape[1:]),
            q.new_zeros(0, q.shape[1]),
        )
        return tuple(o if need else e for o, e, need in zip(out, empty, ctx.needs, strict=True))


def _tangent(scores: Tensor, confusion: Tensor, scores_t: Any, confusion_t: Any, shared_t: Any, index: Any) -> Any:
    """dh = mix(dz, W) + mix(z, dW) + dS; None where all three are."""
    return add(
        None if scores_t is None else mix(scores_t, confusion, index),
        None if confusion_t is None else mix(scores, confusion_t, index),
        None if shared_t is None else shared_t[index[1]],
    )


def _curvature(u: Tensor, probs: Tensor, h_t: Tensor) -> Tensor:
    """u (diag(s) - s s^T) dh, [nnz, K]."""
    return u.unsqueeze(1) * probs * (h_t - (probs * h_t).sum(1, keepdim=True))


def _second_order(
    scores: Tensor,
    confusion: Tensor,
    index: Any,
    g: Tensor,
    q: Tensor,
    scores_t: Any,
    confusion_t: Any,
    needs: Any,
) -> tuple[Any, Any, Any]:
    """Change of (mix_items(g, W), mix_annotators(z, g), sum of g) when g changes by q, z and W by their tangents."""
    dscores = dconfusion = dshared = None
    if needs[0]:
        dscores = mix_items(q, confusion, index)
        if confusion_t is not None:
            dscores = dscores + mix_items(g, confusion_t, index)
    if needs[1]:
        dconfusion = mix_annotators(scores, q, index, confusion.shape[0])
        if scores_t is not None:
            dconfusion = dconfusion + mix_annotators(scores_t, g, index, confusion.shape[0])
    if needs[2]:
        dshared = sum_by_item(q, index)
    return dscores, dconfusion, dshared


def _unfused(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`SoftmaxLink` from the primitives, differentiable to any order."""
    scores, confusion, shared, weight, *index, label, mean = inputs
    h = mix(scores, confusion, index)
    return reference.cross_entropy(h if shared is None else h + shared[index[1]], weight, label, mean)


def _vmap(info: Any, dims: Any, *inputs: Any) -> Any:
    scores, confusion, shared, weight, *index, label, mean = inputs
    fold = Fold(info.batch_size)
    confusion, num_annotators = fold.matrices(confusion, dims[1])
    folded = fold.index(index, dims[4:8], num_annotators)
    rows = fold.rows(scores, dims[0]), confusion, fold.rows(shared, dims[2]), None
    _, nll, probs = _ops.softmax_link(*rows, *folded, fold.rows(label, dims[8]), False)
    nll = fold.split(nll)
    return (fold.loss(nll, weight, dims[3], mean), nll, fold.split(probs)), (0, 0, 0)


def _backward_vmap(info: Any, dims: Any, *inputs: Any) -> Any:
    (
        grad_loss,
        grad_nll,
        scores,
        confusion,
        _,
        weight,
        *index,
        label,
        probs,
        mean,
        need_scores,
        need_confusion,
        need_shared,
    ) = inputs
    fold = Fold(info.batch_size)
    confusion, num_annotators = fold.matrices(confusion, dims[3], share=not need_confusion)
    folded = fold.index(index, dims[6:10], num_annotators)
    probs = fold.front(probs, dims[11])
    u = fold.upstream((grad_loss, grad_nll, weight), (dims[0], dims[1], dims[5]), probs.shape[1], probs, mean)
    rows = fold.rows(scores, dims[2]), confusion, None, None
    needs = (need_scores, need_confusion, need_shared)
    out = _ops.softmax_link_backward(
        None, u, *rows, *folded, fold.rows(label, dims[10]), probs.flatten(0, 1), False, *needs
    )
    return tuple(fold.split(o) for o in out), (0, 0, 0)


ops.register("softmax_link", SoftmaxLink, _vmap)
ops.register("softmax_link_backward", SoftmaxLinkBackward, _backward_vmap)
