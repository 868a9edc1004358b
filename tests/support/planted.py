"""Points of three classes and crowds whose confusions are known: what objectives must recover."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from crowdnal.data import Annotations
from crowdnal.objectives import Objective
from support.small_crowd import C


def blobs(items: int = 600, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(0, C, (items,), generator=generator)
    centres = 3.0 * torch.tensor([[1.0, 0.0], [-0.5, 0.87], [-0.5, -0.87]])
    return centres[truth] + 0.8 * torch.randn(items, 2, generator=generator), truth


def annotate(truth: Tensor, confusion: Tensor, per_item: int, seed: int = 1) -> Annotations:
    generator = torch.Generator().manual_seed(seed)
    annotators = confusion.shape[0]
    who = torch.rand(len(truth), annotators, generator=generator).topk(per_item, dim=1).indices.flatten()
    rows = confusion[who, truth.repeat_interleave(per_item)]
    labels = torch.multinomial(rows, 1, generator=generator).squeeze(1)
    indptr = torch.arange(len(truth) + 1) * per_item
    return Annotations(indptr, who, labels, num_annotators=annotators, num_classes=C)


def fit(objective: Objective, x: Tensor, annotations: Annotations, steps: int = 200, lr: float = 0.05) -> nn.Module:
    torch.manual_seed(0)
    classifier = nn.Linear(x.shape[1], objective.num_classes)
    optimizer = torch.optim.Adam([*classifier.parameters(), *objective.parameters()], lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        objective(classifier(x), annotations).backward()
        optimizer.step()
    return classifier


def planted() -> Tensor:
    """Three good annotators, one who errs 0 -> 1 -> 2 -> 0 (asymmetric), one random, four who say 0."""
    good = torch.full((C, C), 0.05) + 0.85 * torch.eye(C)
    cycle = 0.4 * torch.eye(C) + 0.55 * torch.eye(C).roll(1, 1) + 0.05 * torch.eye(C).roll(2, 1)
    lazy = torch.tensor([0.94, 0.03, 0.03]).expand(C, C)
    return torch.stack([good] * 3 + [cycle, torch.full((C, C), 1 / C)] + [lazy] * 4)
