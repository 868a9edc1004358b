"""Mixture link: -log sum_k p_i[k] A_r[y_n, k], the loss of trace regularisation, CMM and GeoCrowdNet, in log space.

The stored confusion has the observed label outermost, [R, K, C]: an annotation reads one row. Columns are normalised
over the observed labels inside the op (softmax, or softplus divided by its sum), for the batch's annotators only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crowdnal import ops, reference
from crowdnal.functional._autograd._function import OpFunction, VmapBatch, call, save
from crowdnal.functional.segments import gather_rows, scatter_rows, sum_by_item

_ops = torch.ops.crowdnal


class MixtureLink(OpFunction):
    """(loss [], nll [nnz], posterior [nnz, C], log_norm); see `crowdnal.reference.mixture_link`."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        """The fused op."""
        return call(_ops.mixture_link.default, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps inputs and outputs only, so that second order is exact."""
        _, nll, posterior, log_norm = output
        ctx.mark_non_differentiable(posterior, log_norm)
        ctx.set_materialize_grads(False)
        save(ctx, *inputs[:8], nll, posterior, log_norm)
        ctx.normalization, ctx.mean = inputs[8:]

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_nll: Tensor | None, *_: Tensor | None) -> Any:
        """One fused op; the gradient of a weight is the nll it multiplies."""
        *inputs, nll, posterior, log_norm = ctx.saved_tensors
        needs, need_weight = ctx.needs_input_grad[:2], ctx.needs_input_grad[2]
        if grad_loss is None and grad_nll is None:
            return (None,) * 10
        arguments = (grad_loss, grad_nll, *inputs, posterior, log_norm, ctx.normalization, ctx.mean, *needs)
        if torch.compiler.is_compiling():
            grads = _ops.mixture_link_backward(*arguments)
        else:
            grads = MixtureLinkBackward.run(*arguments)
        dweight = None
        if need_weight and grad_loss is not None:
            dweight = reference.upstream(grad_loss, None, None, nll, ctx.mean) * nll
        return (*(g if need else None for g, need in zip(grads, needs, strict=True)), dweight, *[None] * 7)

    @staticmethod
    def jvp(ctx: Any, log_probs_t: Any, confusion_t: Any, weight_t: Any, *rest: Any) -> Any:
        """d nll = -posterior . dt, t the log joint of true class and observed label."""
        log_probs, confusion, weight, *index, label = ctx.saved_tensors[:8]
        joint = _Joint(log_probs, confusion, index, label, ctx.normalization)
        _, nll, posterior = reference.log_sum(joint.value(), weight, ctx.mean)
        t_t = joint.tangent(log_probs_t, confusion_t)
        nll_t = torch.zeros_like(nll) if t_t is None else -(posterior * t_t).sum(1)
        total_t = reference.reduce(nll_t, weight, ctx.mean)
        if weight_t is not None:
            total_t = total_t + reference.reduce(nll, weight_t, ctx.mean)
        return total_t, nll_t, None, None


class MixtureLinkBackward(OpFunction):
    """Gradients of `MixtureLink` for log_probs and confusion; of no use where a `need_` is False."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        """The fused op."""
        return call(_ops.mixture_link_backward.default, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the inputs, not `posterior` and `log_norm`: they are functions of them."""
        ctx.set_materialize_grads(False)
        save(ctx, *inputs[:10])
        ctx.normalization, ctx.mean, *ctx.needs = inputs[12:]

    @staticmethod
    def backward(ctx: Any, log_probs_c: Any, confusion_c: Any) -> Any:
        """Derivative of -sum_n u_n posterior_n . dt_n, dt the change of the log joint along the cotangents."""
        grad_loss, grad_nll, log_probs, confusion, weight, *index, label = ctx.saved_tensors
        log_probs_c, confusion_c = (
            c if need else None for c, need in zip((log_probs_c, confusion_c), ctx.needs, strict=True)
        )
        joint = _Joint(log_probs, confusion, index, label, ctx.normalization)
        t_c = joint.tangent(log_probs_c, confusion_c)
        if t_c is None:
            return (None,) * 16
        posterior = torch.softmax(joint.value(), dim=1)
        u = reference.upstream(grad_loss, grad_nll, weight, posterior, ctx.mean)
        du = -(posterior * t_c).sum(1)
        q = -u.unsqueeze(1) * posterior * (t_c + du.unsqueeze(1))
        dlog_probs, dconfusion = joint.second_order(
            -u.unsqueeze(1) * posterior, q, confusion_c, ctx.needs_input_grad[2:4]
        )
        dgrad_loss = None if grad_loss is None else reference.reduce(du, weight, ctx.mean)
        dweight = None
        if weight is not None and grad_loss is not None:
            dweight = reference.upstream(grad_loss, None, None, du, ctx.mean) * du
        dgrad_nll = None if grad_nll is None else du
        return dgrad_loss, dgrad_nll, dlog_probs, dconfusion, dweight, *[None] * 11

    @staticmethod
    def jvp(ctx: Any, loss_t: Any, nll_t: Any, log_probs_t: Any, confusion_t: Any, weight_t: Any, *rest: Any) -> Any:
        """The same second derivative, along the tangents."""
        grad_loss, grad_nll, log_probs, confusion, weight, *index, label = ctx.saved_tensors
        joint = _Joint(log_probs, confusion, index, label, ctx.normalization)
        posterior = torch.softmax(joint.value(), dim=1)
        u = reference.upstream(grad_loss, grad_nll, weight, posterior, ctx.mean)
        u_t = reference.upstream(loss_t, nll_t, weight, posterior, ctx.mean)
        if weight_t is not None:
            u_t = u_t + reference.upstream(grad_loss, None, weight_t, posterior, ctx.mean)
        q = -u_t.unsqueeze(1) * posterior
        t_t = joint.tangent(log_probs_t, confusion_t)
        if t_t is not None:
            q = q - u.unsqueeze(1) * posterior * (t_t - (posterior * t_t).sum(1, keepdim=True))
        dlog_probs, dconfusion = joint.second_order(-u.unsqueeze(1) * posterior, q, confusion_t, ctx.needs)
        return (
            log_probs.new_zeros(0, log_probs.shape[1]) if dlog_probs is None else dlog_probs,
            log_probs.new_zeros(0, *confusion.shape[1:]) if dconfusion is None else dconfusion,
        )


class _Joint:
    """t_n = log p_i + log A_r[y_n] [nnz, C], and its first and second derivatives, from the primitives."""

    def __init__(self, log_probs: Tensor, confusion: Tensor, index: Any, label: Tensor, normalization: int) -> None:
        self.log_probs, self.confusion, self.index, self.normalization = (
            log_probs,
            confusion,
            index,
            normalization,
        )
        self.key = index[2] * confusion.shape[1] + label
        self.key_order = torch.argsort(self.key, stable=True)

    def _gather(self, log_confusion: Tensor) -> Tensor:
        return gather_rows(log_confusion.reshape(-1, log_confusion.shape[2]), self.key, self.key_order)

    def _scatter(self, rows: Tensor) -> Tensor:
        labels = self.confusion.shape[1]
        return scatter_rows(rows, self.key, self.key_order, self.confusion.shape[0] * labels).reshape(
            self.confusion.shape
        )

    def value(self) -> Tensor:
        indptr, item, _, _ = self.index
        prior = gather_rows(self.log_probs, item, torch.arange(item.shape[0], device=item.device))
        return prior + self._gather(reference.log_confusion(self.confusion, self.normalization))

    def tangent(self, log_probs_t: Tensor | None, confusion_t: Tensor | None) -> Tensor | None:
        terms = []
        if log_probs_t is not None:
            item = self.index[1]
            terms.append(gather_rows(log_probs_t, item, torch.arange(item.shape[0], device=item.device)))
        if confusion_t is not None:
            terms.append(self._gather(reference.log_confusion_jvp(self.confusion, confusion_t, self.normalization)))
        return sum(terms[1:], terms[0]) if terms else None

    def second_order(self, g: Tensor, q: Tensor, confusion_t: Tensor | None, needs: Any) -> tuple[Any, Any]:
        """Change of (sum of g by item, vjp of log A at scattered g) when g changes by q, confusion by its tangent."""
        dlog_probs = sum_by_item(q, self.index) if needs[0] else None
        if not needs[1]:
            return dlog_probs, None
        dconfusion = reference.log_confusion_vjp(self.confusion, self._scatter(q), self.normalization)
        if confusion_t is None or self.normalization == reference.NONE:
            return dlog_probs, dconfusion
        change = reference.log_confusion_vjp_jvp(self.confusion, self._scatter(g), confusion_t, self.normalization)
        return dlog_probs, dconfusion + change


def _vmap(info: Any, dims: Any, *inputs: Any) -> Any:
    log_probs, confusion, weight, *index, label, normalization, mean = inputs
    batch = VmapBatch(info.batch_size)
    confusion, num_annotators = batch.matrices(confusion, dims[1])
    folded = batch.index(index, dims[3:7], num_annotators)
    rows = batch.rows(log_probs, dims[0]), confusion, None
    _, nll, posterior, _ = _ops.mixture_link(*rows, *folded, batch.rows(label, dims[7]), normalization, False)
    nll = batch.split(nll)
    no_norm = nll.new_zeros(0)  # the backward rule lays the matrices out in another way and makes its own
    return (batch.loss(nll, weight, dims[2], mean), nll, batch.split(posterior), no_norm), (0, 0, 0, None)


def _backward_vmap(info: Any, dims: Any, *inputs: Any) -> Any:
    *inputs, normalization, mean, need_log_probs, need_confusion = inputs  # type: ignore[assignment]
    grad_loss, grad_nll, log_probs, confusion, weight, *index, label, posterior, _ = inputs
    batch = VmapBatch(info.batch_size)
    confusion, num_annotators = batch.matrices(confusion, dims[3], share=not need_confusion)
    folded = batch.index(index, dims[5:9], num_annotators)
    posterior = batch.front(posterior, dims[10])
    u = batch.upstream((grad_loss, grad_nll, weight), (dims[0], dims[1], dims[4]), posterior.shape[1], posterior, mean)
    rows = batch.rows(log_probs, dims[2]), confusion, None
    out = _ops.mixture_link_backward(
        None, u, *rows, *folded, batch.rows(label, dims[9]), posterior.flatten(0, 1), None, normalization, False,
        need_log_probs, need_confusion,
    )  # fmt: skip
    return tuple(batch.split(o) for o in out), (0, 0)


ops.register("mixture_link", MixtureLink, _vmap)
ops.register("mixture_link_backward", MixtureLinkBackward, _backward_vmap)
