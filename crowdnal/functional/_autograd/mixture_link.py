"""Mixture link: -log sum_k p_i[k] A_r[y_n, k], the loss of trace regularisation, CMM and GeoCrowdNet, in log space.

The stored confusion has the observed label outermost, [R, K, C]: an annotation reads one row. Columns are normalised
over the observed labels inside the op (softmax, or softplus divided by its sum), for the batch's annotators only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crowdnal import reference
from crowdnal.functional._autograd._function import OpFunction, VmapBatch, add
from crowdnal.functional._autograd._prior import PlainPrior
from crowdnal.functional._autograd._step import StepFunction, StepLoss
from crowdnal.functional.segments import gather_rows, scatter_rows, sum_by_item
from crowdnal.ops import mixture_link as ops


class MixtureLink(OpFunction):
    """(loss [], nll [nnz], posterior [nnz, C], log_norm); see `crowdnal.reference.mixture_link`."""

    op = ops.mixture_link

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps inputs and outputs only, so that second order is exact."""
        _, nll, posterior, log_norm = output
        ctx.mark_non_differentiable(posterior, log_norm)
        ctx.set_materialize_grads(False)
        MixtureLink.keep(ctx, inputs, nll, posterior, log_norm)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_nll: Tensor | None, *_: Tensor | None) -> Any:
        """One fused op; the gradient of a weight is the nll it multiplies."""
        (a, nll, posterior, log_norm), need = MixtureLink.kept(ctx), MixtureLink.needs(ctx)
        if grad_loss is None and grad_nll is None:
            return ops.mixture_link.gradients()
        dlog_probs, dconfusion = ops.mixture_link_backward(
            grad_loss=grad_loss, grad_nll=grad_nll, **a._asdict(), posterior=posterior, log_norm=log_norm,
            need_log_probs=need.log_probs, need_confusion=need.confusion,
        )  # fmt: skip
        dweight = None
        if need.weight and grad_loss is not None:
            dweight = reference.upstream(grad_loss, None, None, nll, a.mean) * nll
        return ops.mixture_link.gradients(
            log_probs=dlog_probs if need.log_probs else None,
            confusion=dconfusion if need.confusion else None,
            weight=dweight,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """d nll = -posterior . dt, t the log joint of true class and observed label."""
        (a, *_), tangent = MixtureLink.kept(ctx), ops.mixture_link.arguments(*tangents)
        joint = _Joint(a)
        _, nll, posterior = reference.log_sum(joint.value(), a.weight, a.mean)
        t_t = joint.tangent(tangent.log_probs, tangent.confusion)
        nll_t = torch.zeros_like(nll) if t_t is None else -(posterior * t_t).sum(1)
        total_t = reference.reduce(nll_t, a.weight, a.mean)
        if tangent.weight is not None:
            total_t = total_t + reference.reduce(nll, tangent.weight, a.mean)
        return total_t, nll_t, None, None

    @staticmethod
    def vmap_op(batch: VmapBatch) -> Any:
        """The weights are left to `VmapBatch.loss`: each problem has a loss of its own."""
        folded = batch.fold("log_probs", "label", matrices="confusion")._replace(weight=None, mean=False)
        _, nll, posterior, _ = batch.op.overload(*folded)
        nll = batch.split(nll)
        no_norm = nll.new_zeros(0)  # the backward rule lays the matrices out in another way and makes its own
        return (batch.loss(nll), nll, batch.split(posterior), no_norm), (0, 0, 0, None)


class MixtureLinkBackward(OpFunction):
    """Gradients of `MixtureLink` for log_probs and confusion; of no use where a `need_` is False."""

    op = ops.mixture_link_backward

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the inputs, not `posterior` and `log_norm`: they are functions of them."""
        ctx.set_materialize_grads(False)
        MixtureLinkBackward.keep(ctx, inputs, without=["posterior", "log_norm"])

    @staticmethod
    def backward(ctx: Any, log_probs_c: Any, confusion_c: Any) -> Any:
        """Derivative of -sum_n u_n posterior_n . dt_n, dt the change of the log joint along the cotangents."""
        (a,), need = MixtureLinkBackward.kept(ctx), MixtureLinkBackward.needs(ctx)
        confusion_c = confusion_c if a.need_confusion else None
        joint = _Joint(a)
        t_c = joint.tangent(log_probs_c if a.need_log_probs else None, confusion_c)
        if t_c is None:
            return ops.mixture_link_backward.gradients()
        posterior = torch.softmax(joint.value(), dim=1)
        u = reference.upstream(a.grad_loss, a.grad_nll, a.weight, posterior, a.mean)
        du = -(posterior * t_c).sum(1)
        q = -u.unsqueeze(1) * posterior * (t_c + du.unsqueeze(1))
        g = -u.unsqueeze(1) * posterior
        dweight = None
        if a.weight is not None and a.grad_loss is not None:
            dweight = reference.upstream(a.grad_loss, None, None, du, a.mean) * du
        return ops.mixture_link_backward.gradients(
            grad_loss=None if a.grad_loss is None else reference.reduce(du, a.weight, a.mean),
            grad_nll=None if a.grad_nll is None else du,
            log_probs=sum_by_item(q, a.index) if need.log_probs else None,
            confusion=joint.pull_back(g, q, confusion_c) if need.confusion else None,
            weight=dweight,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The same second derivative, along the tangents."""
        (a,), tangent = MixtureLinkBackward.kept(ctx), ops.mixture_link_backward.arguments(*tangents)
        joint = _Joint(a)
        posterior = torch.softmax(joint.value(), dim=1)
        u = reference.upstream(a.grad_loss, a.grad_nll, a.weight, posterior, a.mean)
        u_t = reference.upstream(tangent.grad_loss, tangent.grad_nll, a.weight, posterior, a.mean)
        if tangent.weight is not None:
            u_t = u_t + reference.upstream(a.grad_loss, None, tangent.weight, posterior, a.mean)
        q = -u_t.unsqueeze(1) * posterior
        t_t = joint.tangent(tangent.log_probs, tangent.confusion)
        if t_t is not None:
            q = q - u.unsqueeze(1) * posterior * (t_t - (posterior * t_t).sum(1, keepdim=True))
        dlog_probs, dconfusion = q.new_zeros(0, q.shape[1]), q.new_zeros(0, *a.confusion.shape[1:])
        if a.need_log_probs:
            dlog_probs = sum_by_item(q, a.index)
        if a.need_confusion:
            dconfusion = joint.pull_back(-u.unsqueeze(1) * posterior, q, tangent.confusion)
        return dlog_probs, dconfusion

    @staticmethod
    def vmap_op(batch: VmapBatch) -> Any:
        """The weights and the gradient of each problem's loss are folded into that of nll."""
        share, posterior = not batch.arguments.need_confusion, batch.front("posterior")
        folded = batch.fold("log_probs", "label", "posterior", matrices="confusion", share=share)
        folded = folded._replace(grad_loss=None, grad_nll=batch.upstream(posterior), weight=None, mean=False)
        return batch.run(folded._replace(log_norm=None)), (0, 0)


class MixtureStep(StepFunction):
    """(loss [], nll [nnz], gradients for an upstream of 1); see `crowdnal.reference.mixture_link_step`."""

    op, link, inputs = ops.mixture_link_step, MixtureLink, ("log_probs", "confusion")
    prior = PlainPrior(
        lambda matrices, a: reference.log_confusion(matrices, a.normalization),
        lambda matrices, grad, a: reference.log_confusion_vjp(matrices, grad, a.normalization),
        dim=0,
    )


mixture_loss = StepLoss(MixtureStep)


class _Joint:
    """t_n = log p_i + log A_r[y_n] [nnz, C], and its first and second derivatives, from the primitives."""

    def __init__(self, arguments: Any) -> None:
        self.log_probs, self.confusion = arguments.log_probs, arguments.confusion
        self.item, self.normalization = arguments.item, arguments.normalization
        self.key = arguments.annotator * self.confusion.shape[1] + arguments.label
        self.key_order = torch.argsort(self.key, stable=True)

    def _rows(self, log_confusion: Tensor) -> Tensor:
        return gather_rows(log_confusion.reshape(-1, log_confusion.shape[2]), self.key, self.key_order)

    def _scatter(self, rows: Tensor) -> Tensor:
        num_annotators, labels, _ = self.confusion.shape
        rows = scatter_rows(rows, self.key, self.key_order, num_annotators * labels)
        return rows.reshape(self.confusion.shape)

    def _of_item(self, values: Tensor) -> Tensor:
        return gather_rows(values, self.item, torch.arange(self.item.shape[0], device=self.item.device))

    def value(self) -> Tensor:
        rows = self._rows(reference.log_confusion(self.confusion, self.normalization))
        return self._of_item(self.log_probs) + rows

    def tangent(self, log_probs_t: Tensor | None, confusion_t: Tensor | None) -> Any:
        """None where both are."""
        if confusion_t is not None:
            change = reference.log_confusion_jvp(self.confusion, confusion_t, self.normalization)
            confusion_t = self._rows(change)
        return add(None if log_probs_t is None else self._of_item(log_probs_t), confusion_t)

    def pull_back(self, g: Tensor, q: Tensor, confusion_t: Tensor | None) -> Tensor:
        """Change of the confusion's gradient when g [nnz, C], the gradient for t, changes by q."""
        out = reference.log_confusion_vjp(self.confusion, self._scatter(q), self.normalization)
        if confusion_t is None or self.normalization == reference.NONE:
            return out
        return out + reference.log_confusion_vjp_jvp(self.confusion, self._scatter(g), confusion_t, self.normalization)
