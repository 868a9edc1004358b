"""The objectives that add heads or matrices of other kinds, as the tests make them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from crowdnal.objectives import DoctorNet, MaxMIG, Objective, OverparametrizedCrowdLayer, UnionNet, WeightedDoctorNet
from support.small_crowd import C, R, perturbed

D = 5
ITEM = [0, 0, 2, 2, 2, 3]
LABELS = {
    "over": OverparametrizedCrowdLayer,
    "over softmax": partial(OverparametrizedCrowdLayer, hidden="softmax"),
    "union A": partial(UnionNet, variant="A"),
    "union B": UnionNet,
    "doctor": partial(DoctorNet, feature_dim=D, heads="separate"),
    "doctor pooled": partial(DoctorNet, feature_dim=D),
    "doctor residual": partial(DoctorNet, feature_dim=D, heads="residual"),
    "weighted doctor": partial(WeightedDoctorNet, feature_dim=D, head_epochs=0, heads="separate"),
}
MAKERS = {**LABELS, "mig": MaxMIG, "mig prior": partial(MaxMIG, class_prior="votes", learn_class_prior=True)}
CONFUSED = [name for name in MAKERS if "doctor" not in name]


def make(name: str, **kwargs) -> Objective:
    objective = perturbed(MAKERS[name](C, R, **kwargs))
    objective.on_epoch_start(0)
    return objective


def features_of(size: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


def head_probs(objective: DoctorNet, logits: Tensor, x: Tensor) -> Tensor:
    """[B, R, C] of all heads."""
    scores = torch.stack([x @ head[:-1] + head[-1] for head in objective.weight], 1)
    return (scores + logits[:, None] if objective.heads != "separate" else scores).softmax(-1)
