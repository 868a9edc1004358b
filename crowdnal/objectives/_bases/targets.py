"""Cross-entropy against a distribution over classes for each item: the unit is the item, not the annotation."""

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


def target_cross_entropy(logits: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
    """``-Σ_k targets[k] log p[k]``, averaged over the items whose targets are not all zero.

    Args:
        logits: ``[B, C]``.
        targets: ``[B, C]`` not negative; all zero where an item does not count, whatever its logits are.
        reduction: ``"mean"`` or (the same) ``"item_mean"``, ``"per_item"``, ``"sum"``, or ``"none"``: ``[B]``.
    """
    # where, not a product: an item that does not count must give exactly 0 even if its logits are not finite
    loss = -(targets * logits.log_softmax(-1)).where(targets > 0, 0.0).sum(-1)
    return reduce_items(loss, (targets > 0).any(-1), reduction)


def reduce_items(loss: Tensor, counted: Tensor, reduction: Reduction) -> Tensor:
    """``loss [B]``, 0 for items that are not ``counted [B]``, reduced over the others."""
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / counted.sum().clamp(min=1)
