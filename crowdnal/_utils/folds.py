"""How items are dealt into the folds of a cross-fitting."""

from __future__ import annotations

import torch
from torch import Tensor


def deal(items: int, folds: int, seed: int) -> Tensor:
    """``[items]`` fold of each, below ``folds``, whose sizes differ by one at most; on the CPU."""
    return torch.randperm(items, generator=torch.Generator().manual_seed(seed)) % folds
