"""Mixture link: -log sum_k p_i[k] A_r[y_n, k], in log space."""

from __future__ import annotations

import torch
from torch import Tensor

from crowdnal.reference._normalization import NONE, activation, log_confusion, log_confusion_vjp
from crowdnal.reference._prior import prior_distance
from crowdnal.reference._terms import reduce, upstream


def log_sum(t: Tensor, weight: Tensor | None, mean: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [], nll [nnz], posterior [nnz, C]) of the log joint t [nnz, C] of true class and observed label."""
    nll = -t.logsumexp(dim=1)
    return reduce(nll, weight, mean), nll, posterior_of(t)


def posterior_of(t: Tensor) -> Tensor:
    """softmax of t [N, C]; rows of -inf are 0, while NaN stays NaN."""
    impossible = t.isneginf().all(dim=1, keepdim=True)
    return torch.where(impossible, 0.0, torch.softmax(torch.where(impossible, 0.0, t), dim=1))


def mixture_link(
    log_probs: Tensor,
    confusion: Tensor,
    weight: Tensor | None,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    plan: Tensor | None,
    label: Tensor,
    normalization: int,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Negative log-likelihood -log sum_k p_i[k] A_r[y_n, k], in log space.

    Returns:
        loss [] = sum of weight x nll (divided by nnz if `mean`), nll [nnz], posterior [nnz, C] and log_norm, what the
        columns of the annotators who are present are divided by (both not differentiable).
    """
    t = log_probs[item] + log_confusion(confusion, normalization)[annotator, label]
    return *log_sum(t, weight, mean), log_norm(confusion.detach(), annotator, normalization)


def log_norm(confusion: Tensor, annotator: Tensor, normalization: int) -> Tensor:
    """[min(nnz, R), C]: log sum_y f(confusion[r, y]) of each annotator in the batch, ascending; 0 behind them.

    Without normalisation [0, C].
    """
    rows = 0 if normalization == NONE else min(annotator.shape[0], confusion.shape[0])
    sums = activation(confusion, normalization).logsumexp(1)
    present = torch.zeros_like(confusion[:, 0, 0], dtype=torch.bool).index_fill(0, annotator, True)
    rank = torch.where(present, present.cumsum(0) - 1, rows)  # the others to a row that is cut off
    return sums.new_zeros(rows + 1, sums.shape[1]).index_copy(0, rank.clamp(max=rows), sums)[:rows]


def mixture_link_backward(
    grad_loss: Tensor | None,
    grad_nll: Tensor | None,
    log_probs: Tensor,
    confusion: Tensor,
    weight: Tensor | None,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    plan: Tensor | None,
    label: Tensor,
    posterior: Tensor,
    log_norm: Tensor | None,
    normalization: int,
    mean: bool,
    need_log_probs: bool,
    need_confusion: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of `mixture_link` for log_probs and confusion; what is not needed has 0 rows."""
    dt = -upstream(grad_loss, grad_nll, weight, posterior, mean).unsqueeze(1) * posterior
    num_items = indptr.shape[0] - 1 if need_log_probs else 0
    dlog_probs = dt.new_zeros(num_items, dt.shape[1])
    if need_log_probs:
        dlog_probs = dlog_probs.index_add(0, item, dt)
    if not need_confusion:
        return dlog_probs, dt.new_zeros(0, *confusion.shape[1:])
    rows = dt.new_zeros(confusion.shape[0] * confusion.shape[1], confusion.shape[2])
    grad = rows.index_add(0, annotator * confusion.shape[1] + label, dt).reshape(confusion.shape)
    return dlog_probs, log_confusion_vjp(confusion, grad, normalization)


def mixture_link_step(
    log_probs: Tensor,
    confusion: Tensor,
    weight: Tensor | None,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    plan: Tensor | None,
    label: Tensor,
    prior: Tensor | None,
    labels_given: Tensor | None,
    normalization: int,
    mean: bool,
    need_log_probs: bool,
    need_confusion: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss and nll of `mixture_link`, and its `mixture_link_backward` for a grad_loss of 1: a step's two ops as one.

    With a prior [K, C] loss and gradient are also those of A, see `_prior`, of annotators who gave `labels_given` [R].
    """
    inputs, rest = (log_probs, confusion, weight, indptr, item, annotator, order, plan, label), (normalization, mean)
    loss, nll, posterior, norms = mixture_link(*inputs, *rest)
    one, needs = torch.ones_like(loss), (need_log_probs, need_confusion)
    dlog_probs, dconfusion = mixture_link_backward(one, None, *inputs, posterior, norms, *rest, *needs)
    if prior is not None and labels_given is not None:
        u = upstream(one, None, weight, nll, mean)
        u = torch.zeros_like(labels_given).index_add(0, annotator, u) / labels_given.clamp(min=1)
        loss = loss + (u * prior_distance(log_confusion(confusion, normalization), prior, 0)).sum()
        if need_confusion:
            dconfusion = dconfusion + log_confusion_vjp(confusion, -u.view(-1, 1, 1) * prior, normalization)
    return loss, nll, dlog_probs, dconfusion
