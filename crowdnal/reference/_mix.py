"""The primitives: `mix`, `mix_items`, `mix_annotators`; and `select`."""

from __future__ import annotations

import torch
from torch import Tensor

from crowdnal.reference._terms import widen


def mix(
    scores: Tensor,
    confusion: Tensor,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    plan: Tensor | None,
) -> Tensor:
    """h[n, k] = sum_c scores[item_n, c] confusion[annotator_n, c, k]; returns [nnz, K]."""
    return torch.einsum("nc,nck->nk", scores[item], widen(confusion[annotator]))


def mix_items(
    grad: Tensor, confusion: Tensor, indptr: Tensor, item: Tensor, annotator: Tensor, order: Tensor, plan: Tensor | None
) -> Tensor:
    """out[i, c] = sum over annotations n of item i of sum_k grad[n, k] confusion[annotator_n, c, k]; returns [B, C]."""
    rows = torch.einsum("nk,nck->nc", grad, widen(confusion[annotator]))
    return rows.new_zeros(indptr.shape[0] - 1, confusion.shape[1]).index_add(0, item, rows)


def mix_annotators(
    scores: Tensor,
    grad: Tensor,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    plan: Tensor | None,
    num_annotators: int,
) -> Tensor:
    """out[r, c, k] = sum over annotations n of annotator r of scores[item_n, c] grad[n, k]; returns [R, C, K]."""
    outer = torch.einsum("nc,nk->nck", scores[item], grad)
    return outer.new_zeros(num_annotators, scores.shape[1], grad.shape[1]).index_add(0, annotator, outer)


def select(confusion: Tensor, annotators: Tensor) -> Tensor:
    """The matrices [T, C, K] of some annotators."""
    return confusion.index_select(0, annotators)
