"""What losses share whose unit is the item, not the annotation."""

from __future__ import annotations

import torch
from torch import Tensor

from crowdnal.data import Annotations
from crowdnal.functional import Reduction
from crowdnal.functional.segments import sum_rows


def labelled(annotations: Annotations) -> Tensor:
    """``[B]`` whether an item has labels (with a weight above 0)."""
    if annotations.weight is None:
        return annotations.counts > 0
    return sum_rows(annotations.weight, annotations) > 0


def most_probable(scores: Tensor) -> Tensor:
    """``[B, C]`` 1 at the largest of each row, the first of equals, and 0 elsewhere."""
    return torch.zeros_like(scores).scatter_(1, scores.argmax(-1, keepdim=True), 1.0)


def reduce_items(loss: Tensor, units: Tensor, reduction: Reduction) -> Tensor:
    """``loss [B]``, 0 for items that do not count, reduced over the others.

    Args:
        loss: ``[B]``.
        units: ``[B]`` whether an item counts, or how much.
        reduction: as of :class:`crowdnal.Objective`, whose means are all over items.
    """
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    total = units.sum()
    return loss.sum() / (total.where(total > 0, 1.0) if units.is_floating_point() else total.clamp(min=1))
