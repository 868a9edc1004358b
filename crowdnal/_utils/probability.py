"""Counts as probabilities."""

from __future__ import annotations

import torch
from torch import Tensor


def proportions(counts: Tensor, dim: int, floor: float | None = None) -> Tensor:
    """Counts, not negative, as distributions along ``dim``: uniform where all are 0.

    Args:
        counts: of any shape.
        dim: along which the result sums to 1.
        floor: no probability is below it (but for the normalisation, which comes last).
    """
    total = counts.sum(dim, keepdim=True)
    found = torch.where(total > 0, counts / torch.where(total > 0, total, 1), 1 / max(counts.shape[dim], 1))
    if floor is None:
        return found
    found = found.clamp(min=floor)
    return found / found.sum(dim, keepdim=True)
