"""CoNAL in small, and crowds with common and individual noise."""

from __future__ import annotations

import torch

from crowdnal.objectives import CoNAL
from crowdnal.simulation import common_and_individual
from support.small_crowd import C, R

D = 5
ITEM = [0, 0, 2, 2, 2, 3]
FEATURES = torch.randn(4, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
PEOPLE = torch.randn(R, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
OPTIONS = {
    "logits": {},
    "probabilities": {"mixing": "probabilities"},
    "items not normalised": {"normalize_items": False, "separation_weight": 0.3},
    "one layer": {"hidden_dim": None, "separation_weight": 0.3},
    "batch": {"scope": "batch", "separation_weight": 0.3, "mixing": "probabilities"},
    "people": {"annotator_features": PEOPLE, "separation_weight": 0.0},
    "sparse": {"sparse_grad": True, "scope": "batch", "separation_weight": 0.3},
    "sparse people": {"sparse_grad": True, "scope": "batch", "mixing": "probabilities", "annotator_features": PEOPLE},
}


SMALL = {"feature_dim": D, "embedding_dim": 4, "hidden_dim": 6, "confusion_prior": None}


def make(classes: int = C, annotators: int = R, **options) -> CoNAL:
    torch.manual_seed(0)
    return CoNAL(classes, annotators, **{**SMALL, **options})


HARD, PEOPLE_IN_CROWD = 6, 12


def crowd_of(pattern: str = "asymmetric", items: int = 2500, seed: int = 0):
    """Items whose features say their class and, in other directions, which noise their labels have."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(0, HARD, (items,), generator=generator)
    centres = 4.0 * torch.eye(HARD)
    x = torch.cat([centres[truth], torch.zeros(items, 4)], 1) + torch.randn(items, HARD + 4, generator=generator)
    made = common_and_individual(
        truth, x[:, HARD:], PEOPLE_IN_CROWD, HARD, pattern=pattern, common_strength=0.6, individual_strength=0.3,
        contrast=12.0, embedding_dim=4, annotations_per_item=4, seed=seed + 1,
    )  # fmt: skip
    return x, truth, made
