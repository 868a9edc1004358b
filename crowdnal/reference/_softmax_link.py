"""Softmax link: cross-entropy of softmax(scores_i W_r + shared_i)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from crowdnal.reference._mix import mix, mix_annotators, mix_items
from crowdnal.reference._prior import (
    common_scores,
    common_scores_vjp,
    prior_distance,
    softmax_rows,
    softmax_rows_vjp,
)
from crowdnal.reference._terms import reduce, upstream


def residual(probs: Tensor, label: Tensor) -> Tensor:
    """d nll / d h = softmax(h) - onehot(label), [nnz, K]."""
    return probs - (label.unsqueeze(1) == torch.arange(probs.shape[1], device=probs.device)).to(probs.dtype)


def cross_entropy(h: Tensor, weight: Tensor | None, label: Tensor, mean: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [], nll [nnz], probs [nnz, K]) of scores h [nnz, K]."""
    log_probs = F.log_softmax(h, dim=1)
    nll = -log_probs.gather(1, label.unsqueeze(1)).squeeze(1)
    return reduce(nll, weight, mean), nll, log_probs.exp()


def softmax_link(
    scores: Tensor,
    confusion: Tensor,
    shared: Tensor | None,
    mixing: Tensor | None,
    weight: Tensor | None,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    plan: Tensor | None,
    label: Tensor,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of softmax(h_n), h_n = scores_i W_r + shared_i, or mixing_n shared_i + (1 - mixing_n) scores_i W_r.

    Returns:
        loss [] = sum of weight x nll (divided by nnz if `mean`), nll [nnz], probs [nnz, K] (not differentiable).
    """
    h = mix(scores, confusion, indptr, item, annotator, order, plan)
    return cross_entropy(blend(h, shared, mixing, item), weight, label, mean)


def blend(h: Tensor, shared: Tensor | None, mixing: Tensor | None, item: Tensor) -> Tensor:
    """h [nnz, K] with the shared term [B, K] added, or mixed in by mixing [nnz]."""
    if shared is None:
        return h
    return h + shared[item] if mixing is None else h + mixing.unsqueeze(1) * (shared[item] - h)


def softmax_link_backward(
    grad_loss: Tensor | None,
    grad_nll: Tensor | None,
    scores: Tensor,
    confusion: Tensor,
    shared: Tensor | None,
    mixing: Tensor | None,
    weight: Tensor | None,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    plan: Tensor | None,
    label: Tensor,
    probs: Tensor,
    mean: bool,
    need_scores: bool,
    need_confusion: bool,
    need_shared: bool,
    need_mixing: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `softmax_link` for scores, confusion, shared and mixing; what is not needed has 0 rows."""
    index = (indptr, item, annotator, order, plan)
    g = upstream(grad_loss, grad_nll, weight, probs, mean).unsqueeze(1) * residual(probs, label)
    dscores, dconfusion = scores.new_zeros(0, scores.shape[1]), scores.new_zeros(0, *confusion.shape[1:])
    dshared, dmixing = g.new_zeros(indptr.shape[0] - 1 if need_shared else 0, g.shape[1]), g.new_zeros(0)
    own = g if mixing is None else (1 - mixing).unsqueeze(1) * g
    if need_scores:
        dscores = mix_items(own, confusion, *index)
    if need_confusion:
        dconfusion = mix_annotators(scores, own, *index, confusion.shape[0])
    if need_shared:
        dshared = dshared.index_add(0, item, g if mixing is None else mixing.unsqueeze(1) * g)
    if need_mixing and shared is not None:
        dmixing = (g * (shared[item] - mix(scores, confusion, *index))).sum(1)
    return dscores, dconfusion, dshared, dmixing


def softmax_link_step(
    scores: Tensor,
    confusion: Tensor,
    shared: Tensor | None,
    mixing: Tensor | None,
    weight: Tensor | None,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    plan: Tensor | None,
    label: Tensor,
    prior: Tensor | None,
    common: Tensor | None,
    labels_given: Tensor | None,
    mean: bool,
    need_scores: bool,
    need_confusion: bool,
    need_shared: bool,
    need_mixing: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`softmax_link` without probs, and its `softmax_link_backward` for a grad_loss of 1: a step's two ops as one.

    With a prior [C, K] loss and gradient are also those of the matrices' rows, see `_prior`: softmax(W_r + common), of
    annotators who gave `labels_given` [R]. On the CPU what is `common` takes the place of `shared` if that is None, for
    scores that are probabilities.
    """
    of_all = common if shared is None else None
    if of_all is not None:
        shared = common_scores(scores, of_all)
    inputs = (scores, confusion, shared, mixing, weight, indptr, item, annotator, order, plan, label)
    loss, nll, probs = softmax_link(*inputs, mean)
    needs = (need_scores, need_confusion, need_shared or of_all is not None, need_mixing)
    gradients = softmax_link_backward(torch.ones_like(loss), None, *inputs, probs, mean, *needs)
    dscores, dconfusion, dshared, dmixing = gradients
    if of_all is not None:
        dscores = dscores + common_scores_vjp(scores, of_all, dshared) if need_scores else dscores
        dshared = dshared[:0]
    if prior is None or labels_given is None:
        return loss, nll, dscores, dconfusion, dshared, dmixing
    u = upstream(torch.ones_like(loss), None, weight, nll, mean)
    u = torch.zeros_like(labels_given).index_add(0, annotator, u) / labels_given.clamp(min=1)
    loss = loss + (u * prior_distance(softmax_rows(confusion, common), prior, 1)).sum()
    if need_confusion:
        dconfusion = dconfusion + softmax_rows_vjp(confusion, common, -u.view(-1, 1, 1) * prior)
    return loss, nll, dscores, dconfusion, dshared, dmixing
