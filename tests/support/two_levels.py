"""Crowds of two kinds of annotators on three clouds of points, and a plain loop that trains an objective on them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import crowdnal
from crowdnal import Annotations, ObjectiveCallback, simulation
from crowdnal.objectives import CMM
from crowdnal.simulation import AbilityLevels, ability_levels


def crowd(items: int = 300, annotators: int = 40, seed: int = 0, per_item: float = 5) -> tuple[AbilityLevels, Tensor]:
    truth = torch.randint(3, (items,), generator=torch.Generator().manual_seed(seed))
    swap = torch.tensor([[0.1, 0.85, 0.05], [0.05, 0.1, 0.85], [0.85, 0.05, 0.1]])
    levels = torch.stack([simulation.symmetric_confusions(1, 3, 0.92)[0], swap])
    made = ability_levels(truth, levels, (0.65, 0.35), annotators, annotations_per_item=per_item, seed=seed)
    return made, truth


def points(truth: Tensor, seed: int = 0) -> Tensor:
    centres = torch.tensor([[-2.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    return centres[truth] + torch.randn(len(truth), 2, generator=torch.Generator().manual_seed(seed))


def train(objective: CMM, x: Tensor, a: Annotations, epochs: int = 12) -> ObjectiveCallback:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
    data = crowdnal.CrowdDataset(TensorDataset(x), a)
    loader = DataLoader(data, batch_size=100, shuffle=True, collate_fn=crowdnal.collate)
    model = crowdnal.attach(net, objective)
    callback = ObjectiveCallback(model, loader)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(epochs):
        callback.on_epoch_start(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            model(images, labels).loss.backward()
            optimizer.step()
        callback.on_epoch_end(epoch)
    return callback
