"""Softmax link: cross-entropy of softmax(h_n), the loss of CrowdLayer, CoNAL and CCC.

h_n = scores_i W_r [+ shared_i], or mixing_n shared_i + (1 - mixing_n) scores_i W_r.

One op forward, one backward; the backward is a Function too, whose own derivative is written with the primitives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crowdnal import ops, reference
from crowdnal.functional._autograd._function import OpFunction, VmapBatch, add, call, save
from crowdnal.functional._autograd.mix import mix, mix_annotators, mix_items
from crowdnal.functional.segments import sum_by_item

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
        save(ctx, *inputs[:10], nll, probs)
        ctx.mean = inputs[10]

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_nll: Tensor | None, _: Tensor | None) -> Any:
        """One fused op; the gradient of a weight is the nll it multiplies."""
        *inputs, nll, probs = ctx.saved_tensors
        needs, need_weight = ctx.needs_input_grad[:4], ctx.needs_input_grad[4]
        if grad_loss is None and grad_nll is None:
            return (None,) * 11
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
    def jvp(ctx: Any, scores_t: Any, confusion_t: Any, shared_t: Any, mixing_t: Any, weight_t: Any, *rest: Any) -> Any:
        """d nll = (softmax(h) - onehot) . dh."""
        scores, confusion, shared, mixing, weight, *index, label = ctx.saved_tensors[:10]
        link = _Link(scores, confusion, shared, mixing, index)
        _, nll, probs = reference.cross_entropy(link.value(), weight, label, ctx.mean)
        h_t = link.tangent(scores_t, confusion_t, shared_t, mixing_t)
        nll_t = torch.zeros_like(nll) if h_t is None else (reference.residual(probs, label) * h_t).sum(1)
        total_t = reference.reduce(nll_t, weight, ctx.mean)
        if weight_t is not None:
            total_t = total_t + reference.reduce(nll, weight_t, ctx.mean)
        return total_t, nll_t, None


class SoftmaxLinkBackward(OpFunction):
    """Gradients of `SoftmaxLink` for scores, confusion, shared and mixing; of no use where a `need_` is False."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        """The fused op."""
        return call(_ops.softmax_link_backward.default, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the inputs, not `probs`: it is a function of them."""
        ctx.set_materialize_grads(False)
        save(ctx, *inputs[:12])
        ctx.mean, *ctx.needs = inputs[13:]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Derivative of sum_n u_n (softmax(h_n) - onehot) . dh_n, dh the change of h along the cotangents."""
        grad_loss, grad_nll, scores, confusion, shared, mixing, weight, *index, label = ctx.saved_tensors
        link = _Link(scores, confusion, shared, mixing, index)
        cotangents = tuple(c if need else None for c, need in zip(cotangents, ctx.needs, strict=True))
        h_c = link.tangent(*cotangents)
        if h_c is None:
            return (None,) * 18
        _, _, probs = reference.cross_entropy(link.value(), weight, label, ctx.mean)
        u = reference.upstream(grad_loss, grad_nll, weight, probs, ctx.mean)
        residual = reference.residual(probs, label)
        g, q = u.unsqueeze(1) * residual, _curvature(u, probs, h_c)
        gradients = link.second_order(g, q, cotangents, ctx.needs_input_grad[2:6])
        du = (residual * h_c).sum(1)
        dgrad_loss = None if grad_loss is None else reference.reduce(du, weight, ctx.mean)
        dweight = None
        if weight is not None and grad_loss is not None:
            dweight = reference.upstream(grad_loss, None, None, du, ctx.mean) * du
        return dgrad_loss, None if grad_nll is None else du, *gradients, dweight, *[None] * 11

    @staticmethod
    def jvp(ctx: Any, loss_t: Any, nll_t: Any, *tangents: Any) -> Any:
        """The same second derivative, along the tangents."""
        grad_loss, grad_nll, scores, confusion, shared, mixing, weight, *index, label = ctx.saved_tensors
        link = _Link(scores, confusion, shared, mixing, index)
        weight_t, tangents = tangents[4], tangents[:4]
        _, _, probs = reference.cross_entropy(link.value(), weight, label, ctx.mean)
        u = reference.upstream(grad_loss, grad_nll, weight, probs, ctx.mean)
        u_t = reference.upstream(loss_t, nll_t, weight, probs, ctx.mean)
        if weight_t is not None:
            u_t = u_t + reference.upstream(grad_loss, None, weight_t, probs, ctx.mean)
        residual = reference.residual(probs, label)
        q = u_t.unsqueeze(1) * residual
        h_t = link.tangent(*tangents)
        if h_t is not None:
            q = q + _curvature(u, probs, h_t)
        out = link.second_order(u.unsqueeze(1) * residual, q, tangents, ctx.needs)
        return tuple(e if o is None else o for o, e in zip(out, link.empty(q), strict=True))


def _curvature(u: Tensor, probs: Tensor, h_t: Tensor) -> Tensor:
    """u (diag(s) - s s^T) dh, [nnz, K]."""
    return u.unsqueeze(1) * probs * (h_t - (probs * h_t).sum(1, keepdim=True))


class _Link:
    """h [nnz, K] and its first and second derivatives, from the primitives."""

    def __init__(self, scores: Tensor, confusion: Tensor, shared: Any, mixing: Any, index: Any) -> None:
        self.scores, self.confusion, self.shared, self.mixing, self.index = scores, confusion, shared, mixing, index

    def value(self) -> Tensor:
        return reference.blend(self._own(), self.shared, self.mixing, self.index[1])

    def _own(self) -> Tensor:
        return mix(self.scores, self.confusion, self.index)

    def _own_tangent(self, scores_t: Any, confusion_t: Any) -> Any:
        """Change of scores_i W_r."""
        return add(
            None if scores_t is None else mix(scores_t, self.confusion, self.index),
            None if confusion_t is None else mix(self.scores, confusion_t, self.index),
        )

    def _rest(self, rows: Tensor) -> Tensor:
        """rows (1 - mixing)."""
        return rows if self.mixing is None else (1 - self.mixing).unsqueeze(1) * rows

    def tangent(self, scores_t: Any, confusion_t: Any, shared_t: Any, mixing_t: Any) -> Any:
        """dh; None where no input changes."""
        own, shared = self._own_tangent(scores_t, confusion_t), None if shared_t is None else shared_t[self.index[1]]
        if self.mixing is not None and shared is not None:
            shared = self.mixing.unsqueeze(1) * shared
        mixed = None if mixing_t is None else mixing_t.unsqueeze(1) * (self.shared[self.index[1]] - self._own())
        return add(None if own is None else self._rest(own), shared, mixed)

    def second_order(self, g: Tensor, q: Tensor, tangents: Any, needs: Any) -> list[Any]:
        """Change of the gradients of sum_n g_n . h_n when g changes by q, and the inputs by their tangents."""
        scores_t, confusion_t, shared_t, mixing_t = tangents
        moved = None if mixing_t is None else mixing_t.unsqueeze(1) * g
        rows, g_rest = add(self._rest(q), None if moved is None else -moved), self._rest(g)
        out: list[Any] = [None] * 4
        if needs[0]:
            other = None if confusion_t is None else mix_items(g_rest, confusion_t, self.index)
            out[0] = add(mix_items(rows, self.confusion, self.index), other)
        if needs[1]:
            count = self.confusion.shape[0]
            other = None if scores_t is None else mix_annotators(scores_t, g_rest, self.index, count)
            out[1] = add(mix_annotators(self.scores, rows, self.index, count), other)
        if needs[2]:
            out[2] = sum_by_item(add(q if self.mixing is None else self.mixing.unsqueeze(1) * q, moved), self.index)
        if needs[3]:
            own_t, shared_rows = self._own_tangent(scores_t, confusion_t), self.shared[self.index[1]]
            change = add(None if shared_t is None else shared_t[self.index[1]], None if own_t is None else -own_t)
            terms = (q * (shared_rows - self._own())).sum(1), None if change is None else (g * change).sum(1)
            out[3] = add(*terms)
        return out

    def empty(self, rows: Tensor) -> tuple[Tensor, ...]:
        """What stands for the gradients that are not needed."""
        return (
            self.scores.new_zeros(0, self.scores.shape[1]),
            self.scores.new_zeros(0, *self.confusion.shape[1:]),
            rows.new_zeros(0, rows.shape[1]),
            rows.new_zeros(0),
        )


def _vmap(info: Any, dims: Any, *inputs: Any) -> Any:
    scores, confusion, shared, mixing, weight, *index, label, mean = inputs
    batch = VmapBatch(info.batch_size)
    confusion, num_annotators = batch.matrices(confusion, dims[1])
    folded = batch.index(index, dims[5:9], num_annotators)
    rows = batch.rows(scores, dims[0]), confusion, batch.rows(shared, dims[2]), batch.rows(mixing, dims[3]), None
    _, nll, probs = _ops.softmax_link(*rows, *folded, batch.rows(label, dims[9]), False)
    nll = batch.split(nll)
    return (batch.loss(nll, weight, dims[4], mean), nll, batch.split(probs)), (0, 0, 0)


def _backward_vmap(info: Any, dims: Any, *inputs: Any) -> Any:
    grad_loss, grad_nll, scores, confusion, shared, mixing, weight, *index, label, probs = inputs[:13]
    mean, *needs = inputs[13:]
    batch = VmapBatch(info.batch_size)
    confusion, num_annotators = batch.matrices(confusion, dims[3], share=not needs[1])
    folded = batch.index(index, dims[7:11], num_annotators)
    probs = batch.front(probs, dims[12])
    u = batch.upstream((grad_loss, grad_nll, weight), (dims[0], dims[1], dims[6]), probs.shape[1], probs, mean)
    rows = batch.rows(scores, dims[2]), confusion, batch.rows(shared, dims[4]), batch.rows(mixing, dims[5]), None
    out = _ops.softmax_link_backward(
        None, u, *rows, *folded, batch.rows(label, dims[11]), probs.flatten(0, 1), False, *needs
    )
    return tuple(batch.split(o) for o in out), (0, 0, 0, 0)


ops.register("softmax_link", SoftmaxLink, _vmap)
ops.register("softmax_link_backward", SoftmaxLinkBackward, _backward_vmap)
