"""A training step of every method with its tensors on another device: nothing is made or left on the CPU, and the host
never waits for what the device alone knows, so that a CUDA graph can capture the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.attached import C, R, labels
from support.compare import assert_close
from support.other_device import DEVICE, OtherDevice
from torch import Tensor

import crowdnal.functional as F
from crowdnal.data import Annotations
from crowdnal.objectives import OBJECTIVES

N, D = 12, 5
CASES = [
    *((name, {}) for name in OBJECTIVES),
    ("crowd-layer", {"sparse_grad": True}),
    ("trace", {"reduction": "item_mean"}),
]
LOSSES = [F.crowd_cross_entropy, F.crowd_mixture_nll, F.crowd_marginal_nll]


def crowd(weighted: bool) -> Annotations:
    a = labels(N)
    a.item_id = torch.arange(N)
    a.weight = torch.rand(a.num_annotations, generator=torch.Generator().manual_seed(2)) if weighted else None
    return a


@pytest.mark.quick(20)
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_step_stays_on_the_device_and_waits_for_nothing(name: str, options: dict[str, Any], weighted: bool) -> None:
    results = []
    for where in (DEVICE, torch.device("cpu")):
        torch.manual_seed(0)
        objective = OBJECTIVES[name](C, R, **options)
        if objective.needs_features:
            objective.set_feature_dim(D)
        generator = torch.Generator().manual_seed(1)
        values = torch.randn(N, C, generator=generator), torch.randn(N, D, generator=generator)
        with OtherDevice() as device:
            a, objective = crowd(weighted).to(where), objective.to(where).train()
            a.prepare(active=True)
            logits, features = (v.to(where).requires_grad_() for v in values)
            given = features if objective.needs_features else None

            def predict(logits: Tensor = logits, given: Tensor | None = given) -> tuple[Tensor, Tensor | None]:
                return logits.detach(), None if given is None else given.detach()

            objective.on_train_start(a, predict)
            for epoch in range(3):  # rounds may wait
                objective.on_epoch_start(epoch)
            optimizer = torch.optim.SGD([logits, *objective.parameters()], lr=0.1)
            device.waits.clear()
            for _ in range(2):
                torch.manual_seed(3)
                loss = objective(logits, a, given)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            assert not device.waits
            assert all(p.device == where for p in (loss, *objective.parameters(), *objective.buffers()))
            results.append(
                [loss.detach().to("cpu"), *(p.detach().to("cpu") for p in (logits, *objective.parameters()))]
            )
    assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_nor_does_a_loss_on_annotations_as_they_came(loss: Callable[..., Tensor], weighted: bool) -> None:
    a = crowd(weighted)
    raw = Annotations(a.indptr, a.annotator, a.label, num_annotators=R, num_classes=C, weight=a.weight)
    with OtherDevice() as device:
        moved = raw.to(DEVICE)
        scores, confusion = (torch.randn(*sizes).to(DEVICE).requires_grad_() for sizes in ((N, C), (R, C, C)))
        for reduction in ("mean", "sum"):
            loss(scores.log_softmax(1), confusion, moved, reduction=reduction).backward()
        assert moved._order is not None and not device.waits
        assert scores.grad is not None and confusion.grad is not None


def test_the_other_device_notices() -> None:
    with OtherDevice() as device:
        here, there = torch.ones(3), torch.ones(3, device=DEVICE)
        with pytest.raises(RuntimeError, match="on the CPU, others on the device"):
            there + here
        assert (there * 2 + torch.arange(3, device=DEVICE)).device == DEVICE and not device.waits
        for wait in (there.sum().item, there.nonzero, there.unique, there.cpu, lambda: there[there > 2]):
            before = len(device.waits)
            wait()
            assert len(device.waits) > before
