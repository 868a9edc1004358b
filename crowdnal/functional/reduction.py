"""Reductions as weights of the annotations, so that the ops know only a weighted sum."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from crowdnal.data import Annotations
from crowdnal.functional.segments import annotation_weight, sum_rows

Reduction = Literal["mean", "sum", "none", "item_mean", "per_item"]


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
    if reduction == "per_item":
        each = torch.ones_like(annotations.label, dtype=dtype) if weight is None else weight
        counted = annotations.counts if weight is None else sum_rows(weight, annotations)
        return each / (counted > 0).sum().clamp(min=1), False
    raise ValueError(f"reduction={reduction!r} is not one of {', '.join(map(repr, get_args(Reduction)))}")


def _safe_divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 where the denominator is 0."""
    return torch.where(denominator > 0, numerator / torch.where(denominator > 0, denominator, 1.0), 0.0)


def reduce(nll: Tensor, annotations: Annotations, weight: Tensor | None, reduction: Reduction) -> Tensor:
    """nll [nnz] of the annotations, reduced (or, for "none", weighted) as by the fused losses."""
    weight, mean = reduction_weights(annotations, weight, reduction, nll.dtype)
    nll = nll if weight is None else nll * weight
    if reduction == "none":
        return nll
    return nll.sum() / max(annotations.num_annotations, 1) if mean else nll.sum()
