"""The training step of a timm model that `gpu.py` times."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _device import DeviceProblem, turns
from _formulations import GRID, Cell
from kernels import OURS, Row
from torch.nn.functional import cross_entropy

import crowdnal


def train_both(name: str, size: int, arguments: argparse.Namespace) -> Row:
    """A training step in bfloat16 with plain labels and with a CrowdLayer on many annotators' labels."""
    import timm

    device, cell = arguments.device, GRID[0]
    batch = 4 if arguments.quick else cell.items
    problem = DeviceProblem(Cell(cell.name, batch, cell.annotators, cell.classes, cell.per_item), lambda p: [], device)
    images = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
    target = torch.randint(cell.classes, (batch,), device=device)
    steps = {}
    for head in (False, True):
        torch.manual_seed(0)
        model: Any = timm.create_model(name, num_classes=cell.classes)
        if head:
            model = crowdnal.attach(model, crowdnal.CrowdLayer(cell.classes, cell.annotators))
        model.to(device=device, memory_format=torch.channels_last).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

        def step(model: Any = model, optimizer: Any = optimizer, head: bool = head) -> None:
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(images, problem.annotations).loss if head else cross_entropy(model(images), target)
            loss.backward()
            optimizer.step()

        steps[OURS if head else "plain"] = step
    times = turns(steps, device, 3 if arguments.quick else 15, block=0.3)
    overhead = times[OURS] / times["plain"] - 1
    milliseconds = {"plain_milliseconds": 1000 * times["plain"], "head_milliseconds": 1000 * times[OURS]}
    return {"batch": batch, "overhead": overhead, "skipped": None} | milliseconds
