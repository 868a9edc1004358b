"""LIA-ML in small: four instances, three tags, five annotators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crowdnal import LIAML, Annotations

D, T, R = 4, 3, 5


def make(**options: Any) -> LIAML:
    torch.manual_seed(0)
    small = {"num_tags": T, "tag_dim": 2, "hidden_dim": 5, "num_layers": 2, "num_latents": 2, "embedding_dim": 3}
    small |= {"feature_dim": D, "difficulty_precision": 0.0}
    return LIAML(2, R, **{**small, **options}).double()


def crowd(instances: int = 4, seed: int = 0) -> Annotations:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randint(-1, 2, (instances * T, R), generator=generator)
    dense[T : 2 * T] = -1  # instance 1 has no labels
    return Annotations.from_dense(dense, num_classes=2)


def features_of(instances: int = 4) -> Tensor:
    return torch.randn(instances, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
