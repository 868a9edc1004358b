"""Joint link: -log sum_k prior_i[k] prod_n A_r[y_n, k], the marginal likelihood of Dawid-Skene, DL-EM and LIA.

The stored confusion has the observed label outermost and is normalised inside the op, as in the mixture link.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crowdnal import reference
from crowdnal.functional._autograd._function import OpFunction, VmapBatch, add
from crowdnal.functional._autograd._step import StepFunction, StepLoss
from crowdnal.functional._autograd.label_log_likelihood import label_counts, label_log_likelihood
from crowdnal.functional.segments import finite, row_products
from crowdnal.ops import joint_link as ops


class JointLink(OpFunction):
    """(loss [], nll [B], posterior [B, C], log_norm), differentiable but the last; see `reference.joint_link`."""

    op = ops.joint_link

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps inputs and outputs only, so that second order is exact."""
        _, _, posterior, log_norm = output
        ctx.mark_non_differentiable(log_norm)
        ctx.set_materialize_grads(False)
        JointLink.keep(ctx, inputs, posterior, log_norm)

    @staticmethod
    def backward(ctx: Any, grad_loss: Any, grad_nll: Any, grad_posterior: Tensor | None, _: Any) -> Any:
        """One fused op for the likelihood; the primitives for the posterior and for the weight."""
        (a, posterior, log_norm), need = JointLink.kept(ctx), JointLink.needs(ctx)
        dlog_prior = dconfusion = dweight = dt = None
        if grad_loss is not None or grad_nll is not None:
            dlog_prior, dconfusion = ops.joint_link_backward(
                grad_loss=grad_loss, grad_nll=grad_nll, **a._asdict(), posterior=posterior, log_norm=log_norm,
                need_log_prior=need.log_prior, need_confusion=need.confusion,
            )  # fmt: skip
        if grad_posterior is not None:
            dt = _centred(posterior, grad_posterior)
            dlog_prior = add(dlog_prior if need.log_prior else None, dt)
            if need.confusion:
                grad = label_counts(dt, a.weight, a.index, a.label, *a.confusion.shape[:2])
                dconfusion = add(dconfusion, reference.log_confusion_vjp(a.confusion, grad, a.normalization))
        if need.weight and (dlog_prior is not None or dconfusion is not None):
            u = reference.item_upstream(grad_loss, grad_nll, a.indptr, posterior, a.mean)
            dt = add(dt, -u.unsqueeze(1) * posterior)
            dweight = row_products(dt, reference.log_confusion(a.confusion, a.normalization), a.index, a.label)
        return ops.joint_link.gradients(
            log_prior=dlog_prior if need.log_prior else None,
            confusion=dconfusion if need.confusion else None,
            weight=dweight,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """d nll = -posterior . dt, t the log joint of true class and labels."""
        (a, *_), tangent = JointLink.kept(ctx), ops.joint_link.arguments(*tangents)
        joint = _Joint(a)
        _, _, posterior = reference.log_marginal(joint.value(), a.indptr, a.mean)
        t_t = joint.tangent(tangent.log_prior, tangent.confusion, tangent.weight)
        t_t = torch.zeros_like(posterior) if t_t is None else t_t
        loss_t, nll_t = reference.reduce_items(-(posterior * t_t).sum(1), a.indptr, a.mean)
        return loss_t, nll_t, _centred(posterior, t_t), None

    @staticmethod
    def vmap_op(batch: VmapBatch) -> Any:
        """Each problem has a loss of its own."""
        folded = batch.fold("log_prior", "weight", "label", matrices="confusion")
        _, nll, posterior, _ = batch.op.overload(*folded._replace(mean=False))
        nll = batch.split(nll)
        loss = nll.sum(1) / _num_annotated(batch) if folded.mean else nll.sum(1)
        no_norm = nll.new_zeros(0)  # the backward rule lays the matrices out in another way and makes its own
        return (loss, nll, batch.split(posterior), no_norm), (0, 0, 0, None)


class JointLinkBackward(OpFunction):
    """Gradients of loss and nll of `JointLink` for log_prior and confusion; of no use where a `need_` is False."""

    op = ops.joint_link_backward

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the inputs, not `posterior` and `log_norm`: they are functions of them."""
        ctx.set_materialize_grads(False)
        JointLinkBackward.keep(ctx, inputs, without=["posterior", "log_norm"])

    @staticmethod
    def backward(ctx: Any, log_prior_c: Any, confusion_c: Any) -> Any:
        """Derivative of -sum_i u_i posterior_i . dt_i, dt the change of the log joint along the cotangents."""
        (a,), need = JointLinkBackward.kept(ctx), JointLinkBackward.needs(ctx)
        confusion_c = confusion_c if a.need_confusion else None
        joint = _Joint(a)
        t_c = joint.tangent(log_prior_c if a.need_log_prior else None, confusion_c, None)
        if t_c is None:
            return ops.joint_link_backward.gradients()
        _, _, posterior = reference.log_marginal(joint.value(), a.indptr, a.mean)
        g = -reference.item_upstream(a.grad_loss, a.grad_nll, a.indptr, posterior, a.mean).unsqueeze(1) * posterior
        q = g * (t_c - (posterior * t_c).sum(1, keepdim=True))
        dweight = None
        if a.weight is not None and need.weight:
            dweight = row_products(q, joint.log_a, a.index, a.label)
            if confusion_c is not None:
                change = reference.log_confusion_jvp(a.confusion, confusion_c, a.normalization)
                dweight = dweight + row_products(g, change, a.index, a.label)
        dgrad_loss, dgrad_nll = reference.reduce_items(-(posterior * t_c).sum(1), a.indptr, a.mean)
        return ops.joint_link_backward.gradients(
            grad_loss=None if a.grad_loss is None else dgrad_loss,
            grad_nll=None if a.grad_nll is None else dgrad_nll,
            log_prior=q if need.log_prior else None,
            confusion=joint.pull_back(g, q, confusion_c, None) if need.confusion else None,
            weight=dweight,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The same second derivative, along the tangents."""
        (a,), tangent = JointLinkBackward.kept(ctx), ops.joint_link_backward.arguments(*tangents)
        joint = _Joint(a)
        _, _, posterior = reference.log_marginal(joint.value(), a.indptr, a.mean)
        g, q = (
            -reference.item_upstream(of.grad_loss, of.grad_nll, a.indptr, posterior, a.mean).unsqueeze(1) * posterior
            for of in (a, tangent)
        )
        t_t = joint.tangent(tangent.log_prior, tangent.confusion, tangent.weight)
        if t_t is not None:
            q = q + g * (t_t - (posterior * t_t).sum(1, keepdim=True))
        dconfusion = q.new_zeros(0, *a.confusion.shape[1:])
        if a.need_confusion:
            dconfusion = joint.pull_back(g, q, tangent.confusion, tangent.weight)
        return q if a.need_log_prior else q.new_zeros(0, q.shape[1]), dconfusion

    @staticmethod
    def vmap_op(batch: VmapBatch) -> Any:
        """The gradient of each problem's loss is folded into that of nll."""
        share, posterior = not batch.arguments.need_confusion, batch.front("posterior")
        folded = batch.fold("log_prior", "weight", "label", "posterior", matrices="confusion", share=share)
        u = posterior.new_zeros(posterior.shape[:2])
        if folded.grad_loss is not None:
            scale = batch.front("grad_loss")
            u = u + (scale / _num_annotated(batch) if folded.mean else scale).unsqueeze(1)
        if folded.grad_nll is not None:
            u = u + batch.front("grad_nll")
        return batch.run(folded._replace(grad_loss=None, grad_nll=u.flatten(), log_norm=None, mean=False)), (0, 0)


class JointStep(StepFunction):
    """(loss [], nll [B], gradients for an upstream of 1); see `crowdnal.reference.joint_link_step`."""

    op, link, inputs, weighs_nll = ops.joint_link_step, JointLink, ("log_prior", "confusion"), False


joint_loss = StepLoss(JointStep)


def _num_annotated(batch: VmapBatch) -> Tensor:
    return (batch.front("indptr").diff() > 0).sum(1).clamp(min=1)


def _centred(posterior: Tensor, change: Tensor) -> Tensor:
    """Change of a softmax when its logits change, which is also its vjp: both [B, C]."""
    return posterior * (change - (posterior * change).sum(1, keepdim=True))


class _Joint:
    """t_i = log prior_i + sum_n w_n log A_r[y_n] [B, C], its derivative, and what its gradients change by."""

    def __init__(self, arguments: Any) -> None:
        self.log_prior, self.confusion, self.weight = arguments.log_prior, arguments.confusion, arguments.weight
        self.annotations, self.normalization = (arguments.index, arguments.label), arguments.normalization
        self.log_a = reference.log_confusion(self.confusion, self.normalization)

    def value(self) -> Tensor:
        return self.log_prior + label_log_likelihood(self.log_a, self.weight, *self.annotations)

    def tangent(self, log_prior_t: Tensor | None, confusion_t: Tensor | None, weight_t: Tensor | None) -> Any:
        """None where all three are."""
        if confusion_t is not None:
            change = reference.log_confusion_jvp(self.confusion, confusion_t, self.normalization)
            confusion_t = label_log_likelihood(change, self.weight, *self.annotations)
        if weight_t is not None:
            weight_t = label_log_likelihood(finite(self.log_a), weight_t, *self.annotations)
        return add(log_prior_t, confusion_t, weight_t)

    def pull_back(self, g: Tensor, q: Tensor, confusion_t: Tensor | None, weight_t: Tensor | None) -> Tensor:
        """Change of the confusion's gradient when g [B, C], the gradient for t, changes by q."""

        def count(values: Tensor, weight: Tensor | None) -> Tensor:
            return label_counts(values, weight, *self.annotations, *self.confusion.shape[:2])

        change = count(q, self.weight)
        if weight_t is not None:
            change = change + count(g, weight_t)
        out = reference.log_confusion_vjp(self.confusion, change, self.normalization)
        if confusion_t is None or self.normalization == reference.NONE:
            return out
        grad = count(g, self.weight)
        return out + reference.log_confusion_vjp_jvp(self.confusion, grad, confusion_t, self.normalization)
