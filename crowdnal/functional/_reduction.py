"""Reductions as weights of the annotations, so that the ops know only a weighted sum."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from crowdnal.annotations import Annotations
from crowdnal.functional._common import check_shape, index_of
from crowdnal.functional.mix import sum_by_item

Reduction = Literal["mean", "sum", "none", "item_mean"]


def annotation_weight(annotations: Annotations, weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The weight [nnz] of a call, by default the annotations' own; None means 1 everywhere."""
    if weight is None:
        weight = annotations.weight
    if weight is None:
        return None
    check_shape("weight", weight, annotations.num_annotations, meaning="[num_annotations]")
    return weight.to(dtype)


def reduction_weights(
    annotations: Annotations, weight: Tensor | None, reduction: Reduction, dtype: torch.dtype
) -> tuple[Tensor | None, bool]:
    """(weight, mean) of the ops such that their `loss` is the asked reduction; weight is [nnz] or None."""
    weight = annotation_weight(annotations, weight, dtype)
    if reduction in ("sum", "none"):
        return weight, False
    if reduction == "mean":
        return (None, True) if weight is None else (_safe_divide(weight, weight.sum()), False)
    if reduction == "item_mean":
        each = torch.ones_like(annotations.label, dtype=dtype) if weight is None else weight
        item_total = sum_rows(each, annotations)
        num_items = (item_total > 0).sum().clamp(min=1)
        return _safe_divide(each, item_total[annotations.item]) / num_items, False
    raise ValueError(f"reduction={reduction!r} is not one of 'mean', 'sum', 'none', 'item_mean'")


def reduce_terms(terms: Tensor, annotations: Annotations, weight: Tensor | None, reduction: Reduction) -> Tensor:
    """Losses [nnz] of the annotations, weighted and reduced."""
    weight, mean = reduction_weights(annotations, weight, reduction, terms.dtype)
    terms = terms if weight is None else terms * weight
    if reduction == "none":
        return terms
    return terms.sum() / max(annotations.num_annotations, 1) if mean else terms.sum()


def _safe_divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 where the denominator is 0."""
    return torch.where(denominator > 0, numerator / torch.where(denominator > 0, denominator, 1.0), 0.0)


def sum_rows(values: Tensor, annotations: Annotations) -> Tensor:
    """values [nnz] summed over each item's annotations, [B], in a fixed order."""
    return sum_by_item(values.unsqueeze(1), index_of(annotations)).squeeze(1)
