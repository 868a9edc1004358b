"""A crowd of a few habits, and items of many classes."""

from __future__ import annotations

import torch
from torch import Tensor

from crowdnal.data import Annotations
from crowdnal.simulation import simulate


def habitual(annotators: int, classes: int, seed: int = 0) -> Tensor:
    """Everyone names 40 to 90 % of each class, else gives a label from one distribution of theirs."""
    generator = torch.Generator().manual_seed(seed)
    right = 0.4 + 0.5 * torch.rand(annotators, classes, 1, generator=generator)
    habit = torch.randn(annotators, 1, classes, generator=generator).softmax(-1)
    return right * torch.eye(classes) + (1 - right) * habit


def wide_blobs(items: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centres = 2.5 * torch.randn(classes, 8, generator=torch.Generator().manual_seed(77))
    truth = torch.randint(0, classes, (items,), generator=generator)
    return centres[truth] + 0.8 * torch.randn(items, 8, generator=generator), truth


def wide_annotations(truth: Tensor, confusion: Tensor, per_item: int) -> Annotations:
    return simulate(truth, confusion, annotations_per_item=per_item, seed=4)
