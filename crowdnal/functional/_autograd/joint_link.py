"""Joint link: -log sum_k prior_i[k] prod_n A_r[y_n, k], the marginal likelihood of Dawid-Skene, DL-EM and LIA.

The stored confusion has the observed label outermost and is normalised inside the op, as in the mixture link.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from crowdnal import ops, reference
from crowdnal.functional._autograd._function import OpFunction, VmapBatch, add, call, save
from crowdnal.functional._autograd.label_log_likelihood import label_counts, label_log_likelihood
from crowdnal.functional.segments import finite, row_products

_ops = torch.ops.crowdnal


class JointLink(OpFunction):
    """(loss [], nll [B], posterior [B, C], log_norm), differentiable but the last; see `reference.joint_link`."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        """The fused op."""
        return call(_ops.joint_link.default, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps inputs and outputs only, so that second order is exact."""
        _, _, posterior, log_norm = output
        ctx.mark_non_differentiable(log_norm)
        ctx.set_materialize_grads(False)
        save(ctx, *inputs[:8], posterior, log_norm)
        ctx.normalization, ctx.mean = inputs[8:]

    @staticmethod
    def backward(ctx: Any, grad_loss: Any, grad_nll: Any, grad_posterior: Tensor | None, _: Any) -> Any:
        """One fused op for the likelihood; the primitives for the posterior and for the weight."""
        *inputs, posterior, log_norm = ctx.saved_tensors
        _, confusion, weight, *index, label = inputs
        needs, need_weight = ctx.needs_input_grad[:2], ctx.needs_input_grad[2]
        dlog_prior = dconfusion = dweight = dt = None
        if grad_loss is not None or grad_nll is not None:
            arguments = (grad_loss, grad_nll, *inputs, posterior, log_norm, ctx.normalization, ctx.mean, *needs)
            if torch.compiler.is_compiling():
                dlog_prior, dconfusion = _ops.joint_link_backward(*arguments)
            else:
                dlog_prior, dconfusion = JointLinkBackward.run(*arguments)
        if grad_posterior is not None:
            dt = _centred(posterior, grad_posterior)
            dlog_prior = add(dlog_prior if needs[0] else None, dt)
            if needs[1]:
                grad = label_counts(dt, weight, index, label, *confusion.shape[:2])
                dconfusion = add(dconfusion, reference.log_confusion_vjp(confusion, grad, ctx.normalization))
        if need_weight and (dlog_prior is not None or dconfusion is not None):
            u = reference.item_upstream(grad_loss, grad_nll, index[0], posterior, ctx.mean)
            dt = add(dt, -u.unsqueeze(1) * posterior)
            dweight = row_products(dt, reference.log_confusion(confusion, ctx.normalization), index, label)
        return dlog_prior if needs[0] else None, dconfusion if needs[1] else None, dweight, *[None] * 7

    @staticmethod
    def jvp(ctx: Any, log_prior_t: Any, confusion_t: Any, weight_t: Any, *rest: Any) -> Any:
        """d nll = -posterior . dt, t the log joint of true class and labels."""
        log_prior, confusion, weight, *index, label = ctx.saved_tensors[:8]
        joint = _Joint(log_prior, confusion, weight, index, label, ctx.normalization)
        _, _, posterior = reference.log_marginal(joint.value(), index[0], ctx.mean)
        t_t = joint.tangent(log_prior_t, confusion_t, weight_t)
        t_t = torch.zeros_like(posterior) if t_t is None else t_t
        loss_t, nll_t = reference.reduce_items(-(posterior * t_t).sum(1), index[0], ctx.mean)
        return loss_t, nll_t, _centred(posterior, t_t), None


class JointLinkBackward(OpFunction):
    """Gradients of loss and nll of `JointLink` for log_prior and confusion; of no use where a `need_` is False."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        """The fused op."""
        return call(_ops.joint_link_backward.default, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the inputs, not `posterior` and `log_norm`: they are functions of them."""
        ctx.set_materialize_grads(False)
        save(ctx, *inputs[:10])
        ctx.normalization, ctx.mean, *ctx.needs = inputs[12:]

    @staticmethod
    def backward(ctx: Any, log_prior_c: Any, confusion_c: Any) -> Any:
        """Derivative of -sum_i u_i posterior_i . dt_i, dt the change of the log joint along the cotangents."""
        grad_loss, grad_nll, log_prior, confusion, weight, *index, label = ctx.saved_tensors
        log_prior_c, confusion_c = (
            c if need else None for c, need in zip((log_prior_c, confusion_c), ctx.needs, strict=True)
        )
        joint = _Joint(log_prior, confusion, weight, index, label, ctx.normalization)
        t_c = joint.tangent(log_prior_c, confusion_c, None)
        if t_c is None:
            return (None,) * 16
        _, _, posterior = reference.log_marginal(joint.value(), index[0], ctx.mean)
        g = -reference.item_upstream(grad_loss, grad_nll, index[0], posterior, ctx.mean).unsqueeze(1) * posterior
        q = g * (t_c - (posterior * t_c).sum(1, keepdim=True))
        need_log_prior, need_confusion, need_weight = ctx.needs_input_grad[2:5]
        dconfusion = joint.pull_back(g, q, confusion_c, None) if need_confusion else None
        dweight = None
        if weight is not None and need_weight:
            dweight = row_products(q, joint.log_a, index, label)
            if confusion_c is not None:
                change = reference.log_confusion_jvp(confusion, confusion_c, ctx.normalization)
                dweight = dweight + row_products(g, change, index, label)
        dgrad_loss, dgrad_nll = reference.reduce_items(-(posterior * t_c).sum(1), index[0], ctx.mean)
        return (
            None if grad_loss is None else dgrad_loss,
            None if grad_nll is None else dgrad_nll,
            q if need_log_prior else None,
            dconfusion,
            dweight,
            *[None] * 11,
        )

    @staticmethod
    def jvp(ctx: Any, loss_t: Any, nll_t: Any, log_prior_t: Any, confusion_t: Any, weight_t: Any, *rest: Any) -> Any:
        """The same second derivative, along the tangents."""
        grad_loss, grad_nll, log_prior, confusion, weight, *index, label = ctx.saved_tensors
        joint = _Joint(log_prior, confusion, weight, index, label, ctx.normalization)
        _, _, posterior = reference.log_marginal(joint.value(), index[0], ctx.mean)
        g, q = (
            -reference.item_upstream(*grads, index[0], posterior, ctx.mean).unsqueeze(1) * posterior
            for grads in ((grad_loss, grad_nll), (loss_t, nll_t))
        )
        t_t = joint.tangent(log_prior_t, confusion_t, weight_t)
        if t_t is not None:
            q = q + g * (t_t - (posterior * t_t).sum(1, keepdim=True))
        dconfusion = log_prior.new_zeros(0, *confusion.shape[1:])
        if ctx.needs[1]:
            dconfusion = joint.pull_back(g, q, confusion_t, weight_t)
        return q if ctx.needs[0] else q.new_zeros(0, q.shape[1]), dconfusion


def _centred(posterior: Tensor, change: Tensor) -> Tensor:
    """Change of a softmax when its logits change, which is also its vjp: both [B, C]."""
    return posterior * (change - (posterior * change).sum(1, keepdim=True))


class _Joint:
    """t_i = log prior_i + sum_n w_n log A_r[y_n] [B, C], its derivative, and what its gradients change by."""

    def __init__(
        self,
        log_prior: Tensor,
        confusion: Tensor,
        weight: Tensor | None,
        index: Sequence[Tensor],
        label: Tensor,
        normalization: int,
    ) -> None:
        self.log_prior, self.confusion, self.weight = log_prior, confusion, weight
        self.annotations, self.normalization = (index, label), normalization
        self.log_a = reference.log_confusion(confusion, normalization)

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


def _vmap(info: Any, dims: Any, *inputs: Any) -> Any:
    log_prior, confusion, weight, *index, label, normalization, mean = inputs
    batch = VmapBatch(info.batch_size)
    confusion, num_annotators = batch.matrices(confusion, dims[1])
    folded = batch.index(index, dims[3:7], num_annotators)
    rows = batch.rows(log_prior, dims[0]), confusion, batch.rows(weight, dims[2])
    _, nll, posterior, _ = _ops.joint_link(*rows, *folded, batch.rows(label, dims[7]), normalization, False)
    nll = batch.split(nll)
    loss = nll.sum(1) / _num_annotated(batch, index[0], dims[3]) if mean else nll.sum(1)
    no_norm = nll.new_zeros(0)  # the backward rule lays the matrices out in another way and makes its own
    return (loss, nll, batch.split(posterior), no_norm), (0, 0, 0, None)


def _num_annotated(batch: VmapBatch, indptr: Tensor, dim: int | None) -> Tensor:
    return (batch.front(indptr, dim).diff() > 0).sum(1).clamp(min=1)


def _backward_vmap(info: Any, dims: Any, *inputs: Any) -> Any:
    *inputs, normalization, mean, need_log_prior, need_confusion = inputs  # type: ignore[assignment]
    grad_loss, grad_nll, log_prior, confusion, weight, *index, label, posterior, _ = inputs
    batch = VmapBatch(info.batch_size)
    confusion, num_annotators = batch.matrices(confusion, dims[3], share=not need_confusion)
    folded = batch.index(index, dims[5:9], num_annotators)
    posterior = batch.front(posterior, dims[10])
    u = posterior.new_zeros(posterior.shape[:2])
    if grad_loss is not None:
        scale = batch.front(grad_loss, dims[0])
        u = u + (scale / _num_annotated(batch, index[0], dims[5]) if mean else scale).unsqueeze(1)
    if grad_nll is not None:
        u = u + batch.front(grad_nll, dims[1])
    rows = batch.rows(log_prior, dims[2]), confusion, batch.rows(weight, dims[4])
    out = _ops.joint_link_backward(
        None, u.flatten(), *rows, *folded, batch.rows(label, dims[9]), posterior.flatten(0, 1), None, normalization,
        False, need_log_prior, need_confusion,
    )  # fmt: skip
    return tuple(batch.split(o) for o in out), (0, 0)


ops.register("joint_link", JointLink, _vmap)
ops.register("joint_link_backward", JointLinkBackward, _backward_vmap)
