"""LIA in small, on the small crowd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crowdnal import LIA
from crowdnal._utils.layers import MLP
from crowdnal.data import Annotations
from support.small_crowd import ANNOTATOR, INDPTR, LABEL, C, R, batch

D = 5
ITEM = [0, 0, 2, 2, 2, 3]
FEATURES = torch.randn(4, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
PEOPLE = torch.randn(R, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "one latent, people": {"num_latents": 1, "annotator_features": PEOPLE, "competence_layers": 1},
    "embedding": {"instance": "embedding", "num_items": 4, "feature_dim": None},
    "five labels, linear": {"num_labels": 5, "num_layers": 0, "use_prior": False},
}
PHASES = {"em": {"rounds": 1}, "item": {"rounds": 0}, "annotation": {"rounds": 0, "finetune": "annotation"}}


def make(classes: int = C, annotators: int = R, **options: Any) -> LIA:
    torch.manual_seed(0)
    small: dict[str, Any] = {"feature_dim": D, "hidden_dim": 6, "num_layers": 2, "num_latents": 3, "embedding_dim": 4}
    small |= {"competence_precision": 0.0, "difficulty_precision": 0.0}
    return LIA(classes, annotators, **{**small, **options})


def crowd(weighted: bool, labels: int) -> Annotations:
    sizes = {"num_annotators": R, "num_classes": labels}
    return Annotations(INDPTR, ANNOTATOR, LABEL, **sizes, weight=batch(weighted).weight, item_id=range(4))


def plain_mlp(mlp: MLP, x: Tensor) -> Tensor:
    for n, layer in enumerate(mlp.layers):
        x = layer.weight @ (x.clamp(min=0) if n else x) + layer.bias
    return x
