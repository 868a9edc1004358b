"""What a head adds to a training step: its own forward, backward and update, beside the plain step it sits in."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import timm
import torch
from _machine import OtherProcesses, describe
from torch.nn import functional as F

import crowdnal

CLASSES, ANNOTATORS, PER_ITEM = 8, 59, 3  # as LabelMe
OBJECTIVES = ("crowd-layer", "trace", "conal", "dl-em", "doctor-net")
TARGET = 0.01


def run(quick: bool) -> dict[str, Any]:
    """All heads, interleaved with the plain step."""
    network, items, pixels, turns = ("test_resnet", 8, 32, 2) if quick else ("resnet18", 64, 64, 9)
    torch.manual_seed(0)
    model = timm.create_model(network, num_classes=CLASSES).train()
    images, truth = torch.randn(items, 3, pixels, pixels), torch.randint(0, CLASSES, (items,))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def plain() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), truth).backward()
        optimizer.step()

    logits = torch.randn(items, CLASSES, requires_grad=True)
    features = torch.randn(items, model.head_hidden_size, requires_grad=True)

    def cross_entropy() -> None:
        logits.grad = None
        F.cross_entropy(logits, truth).backward()

    forms = {"plain step": plain, "cross-entropy": cross_entropy}
    forms |= {name: head(name, logits, features) for name in OBJECTIVES}
    for form in forms.values():
        form()
    others = OtherProcesses()
    repeats = 2 if quick else 20
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(turns):
        for name, form in forms.items():
            for _ in range(1 if name == "plain step" else repeats):
                start = time.perf_counter()
                form()
                seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    rows = []
    for name in OBJECTIVES:
        share = (median[name] - median["cross-entropy"]) / median["plain step"]
        rows.append({"objective": name, "seconds": median[name], "overhead": share, "target": TARGET})
        print(f"{name:12} {1e6 * median[name]:7.0f} us, {100 * share:5.2f} % of a plain step", flush=True)
    busy = others.cores()
    print(f"plain step {median['plain step']:.3f} s, {busy:.1f} cores busy elsewhere")
    return {
        "benchmark": "overhead",
        "quick": quick,
        "machine": describe(),
        "setting": {
            "model": network, "items": items, "pixels": pixels, "turns": turns, "classes": CLASSES,
            "annotators": ANNOTATORS, "labels_per_item": PER_ITEM, "optimizer": "AdamW",
        },
        "plain": {"seconds": median["plain step"], "cross_entropy_seconds": median["cross-entropy"]},
        "rows": rows,
        "cores_busy_elsewhere": busy,
    }  # fmt: skip


def head(name: str, logits: torch.Tensor, features: torch.Tensor) -> Callable[[], None]:
    """Loss, backward and update of an objective, on given logits and features."""
    items = len(logits)
    objective = crowdnal.objectives.create(name, num_classes=CLASSES, num_annotators=ANNOTATORS)
    objective.set_feature_dim(features.shape[1])
    chosen = torch.rand(items, ANNOTATORS).argsort(1) < PER_ITEM
    dense = torch.randint(0, CLASSES, (items, ANNOTATORS)).where(chosen, -1)
    annotations = crowdnal.Annotations.from_dense(dense, num_classes=CLASSES).prepare()
    objective.on_train_start(annotations, lambda: (logits.detach(), features.detach()))
    batch = annotations[list(range(items))].prepare()
    parameters = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, 1e-3) if parameters else None

    def step() -> None:
        logits.grad = features.grad = None
        if optimizer is not None:
            optimizer.zero_grad()
        objective(logits, batch, features).backward()
        if optimizer is not None:
            optimizer.step()

    return step
