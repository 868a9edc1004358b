"""Crowds whose confusions depend on the item, and a plain loop that trains LIA on them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from crowdnal import LIA, Annotations, ObjectiveCallback, attach
from crowdnal.simulation import simulate, symmetric_confusions

C, R, D = 3, 12, 3
SKILL = torch.linspace(0.55, 0.95, R)
EASY, HARD = symmetric_confusions(R, C, SKILL), symmetric_confusions(R, C, 0.45)


def problem(items: int = 1500, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Annotations]:
    """Features, truth, whether an item is hard (nearly to be seen in its features), three labels an item."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(C, (items,), generator=generator)
    hard = torch.rand(items, generator=generator) < 0.5
    angle = 2 * torch.pi * truth / C
    centre = torch.stack([angle.cos(), angle.sin(), (2 * hard - 1) / 1.2], 1)
    noise = torch.randn(items, D, generator=generator) * torch.tensor([0.6, 0.6, 0.3])
    which = truth + C * hard.long()
    annotations = simulate(which, torch.cat([EASY, HARD], 1), annotations_per_item=3, seed=seed + 1)
    return 1.2 * centre + noise, truth, hard, annotations


class Featured(nn.Module):
    """A classifier that gives its input as features."""

    def __init__(self, dim: int = D, classes: int = C) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 16), nn.ReLU(), nn.Linear(16, classes))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), x


def fit(
    objective: LIA, x: Tensor, annotations: Annotations, epochs: int, net: nn.Module | None = None
) -> ObjectiveCallback:
    model = attach(net or Featured(x.shape[1], objective.num_classes), objective)
    callback = ObjectiveCallback(model, [(x, annotations)], annotations)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
    for epoch in range(epochs):
        callback.on_epoch_start(epoch)
        optimizer.zero_grad()
        model(x, annotations).loss.backward()
        optimizer.step()
        callback.on_epoch_end(epoch)
    return callback
