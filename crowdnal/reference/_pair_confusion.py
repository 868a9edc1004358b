"""Pair confusion: the confusion of an item-annotator pair as a product of positive tensors (Platanios et al. 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from crowdnal.reference._terms import widen


def pair_highest(values: Tensor) -> Tensor:
    """Maximum over labels and latents of values [..., K, L], [..., 1, 1]; 0 where that is -infinity."""
    highest = values.detach().amax((-2, -1), keepdim=True)
    return highest.masked_fill(highest == -torch.inf, 0.0)


def observed(pairs: Tensor, label: Tensor) -> Tensor:
    """pairs [n, C, K, L] at each one's label: [n, C, L]."""
    return pairs.gather(2, _index(pairs, label)).squeeze(2)


def add_observed(pairs: Tensor, label: Tensor, own: Tensor) -> Tensor:
    """pairs [n, C, K, L] plus own [n, C, L] at each one's label."""
    index = _index(pairs, label)
    return pairs.scatter(2, index, pairs.gather(2, index) + own.unsqueeze(2))


def _index(pairs: Tensor, label: Tensor) -> Tensor:
    return label.reshape(-1, 1, 1, 1).expand(-1, pairs.shape[1], 1, pairs.shape[3])


def pair_confusion(
    difficulty: Tensor,
    competence: Tensor,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    plan: Tensor | None,
    label: Tensor,
) -> tuple[Tensor, Tensor]:
    """log Q_n[k, y_n], Q_n[k, :] = softmax over j of logsumexp_l (difficulty_i + competence_r)[k, j, l].

    Args:
        difficulty: [B, C, K, L].
        competence: [R, C, K, L].
        indptr: [B + 1], with item, annotator, order and label [nnz].
        item: see indptr.
        annotator: see indptr.
        order: see indptr.
        plan: not read.
        label: see indptr.

    Returns:
        log_q [nnz, C], -infinity where the label is impossible and where every label is; log_norm [nnz, C], the
        logsumexp over j and l of both tensors less their own maxima over j and l (not differentiable).
    """
    d, c = (t - pair_highest(t) for t in (widen(difficulty), widen(competence)))
    pairs = d[item] + c[annotator]
    log_norm = pairs.flatten(2).logsumexp(2)
    log_q = observed(pairs, label).logsumexp(2) - log_norm
    return log_q.masked_fill(log_norm == -torch.inf, -torch.inf), log_norm.detach()


def pair_confusion_backward(
    grad: Tensor,
    difficulty: Tensor,
    competence: Tensor,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    plan: Tensor | None,
    label: Tensor,
    log_q: Tensor,
    log_norm: Tensor,
    need_difficulty: bool,
    need_competence: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of `pair_confusion` from grad [nnz, C] for log_q; what is not needed has 0 rows.

    An impossible label moves no latent of its own, an impossible class nothing.
    """
    d, c = (t - pair_highest(t) for t in (widen(difficulty), widen(competence)))
    pairs = d[item] + c[annotator]
    rows = -grad[:, :, None, None] * _share(pairs, log_norm[:, :, None, None])
    own = grad.unsqueeze(2) * _share(observed(pairs, label), (log_norm + log_q).unsqueeze(2))
    rows = add_observed(rows, label, own)
    num_items = indptr.shape[0] - 1 if need_difficulty else 0
    num_annotators = competence.shape[0] if need_competence else 0
    ddifficulty = rows.new_zeros(num_items, *rows.shape[1:])
    dcompetence = rows.new_zeros(num_annotators, *rows.shape[1:])
    return (
        ddifficulty.index_add(0, item, rows) if need_difficulty else ddifficulty,
        dcompetence.index_add(0, annotator, rows) if need_competence else dcompetence,
    )


def _share(values: Tensor, log_sum: Tensor) -> Tensor:
    """exp(values - log_sum); 0 where the sum has no terms."""
    empty = log_sum == -torch.inf
    return (values - log_sum.masked_fill(empty, 0.0)).exp().masked_fill(empty, 0.0)
