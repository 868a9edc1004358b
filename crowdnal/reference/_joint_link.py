"""Joint link: -log sum_k prior_i[k] prod_n A_r[y_n, k], over all annotations of an item, in log space."""

from __future__ import annotations

import torch
from torch import Tensor

from crowdnal.reference._label_log_likelihood import label_counts, label_log_likelihood
from crowdnal.reference._mixture_link import log_norm as norms_of
from crowdnal.reference._mixture_link import posterior_of
from crowdnal.reference._normalization import log_confusion, log_confusion_vjp


def _annotated(indptr: Tensor) -> Tensor:
    return indptr[1:] > indptr[:-1]


def _scale(total: Tensor, indptr: Tensor, mean: bool) -> Tensor:
    return total / _annotated(indptr).sum().clamp(min=1) if mean else total


def reduce_items(values: Tensor, indptr: Tensor, mean: bool) -> tuple[Tensor, Tensor]:
    """(loss [], nll [B]) of values [B]: 0 without annotations, `mean` over the annotated items."""
    nll = torch.where(_annotated(indptr), values, 0.0)
    return _scale(nll.sum(), indptr, mean), nll


def item_upstream(
    grad_loss: Tensor | None, grad_nll: Tensor | None, indptr: Tensor, like: Tensor, mean: bool
) -> Tensor:
    """Adjoint of `reduce_items`: d output / d values [B]; `like` is any [B, ...] tensor."""
    out = like.new_zeros(like.shape[0])
    if grad_loss is not None:
        out = out + _scale(grad_loss, indptr, mean)
    return torch.where(_annotated(indptr), out if grad_nll is None else out + grad_nll, 0.0)


def log_marginal(t: Tensor, indptr: Tensor, mean: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [], nll [B], posterior [B, C]) of the log joint t [B, C] of true class and all labels of an item."""
    return *reduce_items(-t.logsumexp(dim=1), indptr, mean), posterior_of(t)


def joint_link(
    log_prior: Tensor,
    confusion: Tensor,
    weight: Tensor | None,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    label: Tensor,
    normalization: int,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Negative log marginal likelihood of each item's labels, and the posterior over its true class.

    Returns:
        loss [] = sum of nll (divided by the number of annotated items if `mean`), nll [B] (0 without annotations,
        inf where every class is impossible), posterior [B, C] (then 0), log_norm as from `mixture_link`.
    """
    t = log_prior + label_log_likelihood(
        log_confusion(confusion, normalization), weight, indptr, item, annotator, order, label
    )
    return *log_marginal(t, indptr, mean), norms_of(confusion.detach(), annotator, normalization)


def joint_link_backward(
    grad_loss: Tensor | None,
    grad_nll: Tensor | None,
    log_prior: Tensor,
    confusion: Tensor,
    weight: Tensor | None,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    label: Tensor,
    posterior: Tensor,
    log_norm: Tensor | None,
    normalization: int,
    mean: bool,
    need_log_prior: bool,
    need_confusion: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of `joint_link` (of loss and nll) for log_prior and confusion; what is not needed has 0 rows."""
    dt = -item_upstream(grad_loss, grad_nll, indptr, posterior, mean).unsqueeze(1) * posterior
    dlog_prior = dt if need_log_prior else dt.new_zeros(0, dt.shape[1])
    if not need_confusion:
        return dlog_prior, dt.new_zeros(0, *confusion.shape[1:])
    grad = label_counts(dt, weight, indptr, item, annotator, order, label, *confusion.shape[:2])
    return dlog_prior, log_confusion_vjp(confusion, grad, normalization)


def joint_link_step(
    log_prior: Tensor,
    confusion: Tensor,
    weight: Tensor | None,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    label: Tensor,
    normalization: int,
    mean: bool,
    need_log_prior: bool,
    need_confusion: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss and nll of `joint_link`, and its `joint_link_backward` for a grad_loss of 1: a step's two ops as one."""
    inputs, rest = (log_prior, confusion, weight, indptr, item, annotator, order, label), (normalization, mean)
    loss, nll, posterior, norms = joint_link(*inputs, *rest)
    one, needs = torch.ones_like(loss), (need_log_prior, need_confusion)
    return loss, nll, *joint_link_backward(one, None, *inputs, posterior, norms, *rest, *needs)
