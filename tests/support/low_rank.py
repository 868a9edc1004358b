"""Objectives with low-rank confusions, and their matrices."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from crowdnal.confusion.low_rank import LowRankConfusion
from crowdnal.objectives import (
    CrowdLayer,
    GeoCrowdNet,
    OverparametrizedCrowdLayer,
    SingleConfusion,
    TraceRegularized,
)

RANK = {
    "crowd-layer": partial(CrowdLayer, rank=2),
    "crowd-layer-over": partial(OverparametrizedCrowdLayer, rank=2),
    "crowd-layer-over softmax": partial(OverparametrizedCrowdLayer, rank=2, hidden="softmax"),
    "trace": partial(TraceRegularized, rank=2),
    "trace batch": partial(TraceRegularized, rank=1, scope="batch", trace_weight=0.3),
    "geocrowdnet": partial(GeoCrowdNet, rank=3, volume_weight=0.1),
    "geocrowdnet W": partial(GeoCrowdNet, rank=2, volume="W", volume_weight=0.3),
    "geocrowdnet W batch": partial(GeoCrowdNet, rank=2, volume="W", volume_weight=0.3, scope="batch"),
    "single-confusion": partial(SingleConfusion, rank=2, regularizer="frobenius"),
}


def dense_scores(m: LowRankConfusion) -> Tensor:
    """W [R, C, K]."""
    annotators, classes, _ = m.left.shape
    w = torch.zeros(annotators, classes, m.right.shape[2], dtype=m.left.dtype)
    for k in range(m.diagonal.shape[1]):
        w[:, k, k] = 1.0
        w[:, k, k] *= m.diagonal[:, k]
    return w + torch.einsum("rcm,rmk->rck", m.left, m.right)
