"""What the tests of attached models share: objectives, a small classifier, random annotations."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from crowdnal.annotations import Annotations
from crowdnal.objectives import CrowdLayer, GeoCrowdNet, MajorityVote, SoftMajorityVote, TraceRegularized

C, R = 4, 6
ATTACHED = {
    "majority": MajorityVote,
    "soft": SoftMajorityVote,
    "crowd-layer": CrowdLayer,
    "crowd-layer VW+B": partial(CrowdLayer, variant="VW+B"),
    "trace": partial(TraceRegularized, scope="batch"),
    "crowd-layer rank": partial(CrowdLayer, rank=2, groups=[0, 1, 2, 0, 1, 3]),
    "geocrowdnet rank": partial(GeoCrowdNet, rank=2, volume_weight=0.0),
}


def labels(items: int, seed: int = 0) -> Annotations:
    dense = torch.randint(-1, C, (items, R), generator=torch.Generator().manual_seed(seed))
    return Annotations.from_dense(dense, num_classes=C).prepare()


def mlp(dim: int = 5, outputs: int = C) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(dim, 8), nn.ReLU(), nn.Linear(8, outputs))
