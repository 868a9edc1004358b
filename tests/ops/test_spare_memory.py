"""The memory of a large gradient: taken over by the next one, and never from under somebody who holds it."""

from __future__ import annotations

import gc
import sys
import threading
from functools import cache
from typing import Any

import pytest
import torch
from support.compare import assert_same
from torch import Tensor

import crowdnal
from crowdnal import functional as F
from crowdnal.ops import OPS

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
kept = pytest.mark.skipif(
    crowdnal.backend()["cpu"] != "native" or sys.platform != "linux" or TORCH < (2, 11),
    reason="memory is kept by the native library, on Linux, from torch 2.11 on",
)
CLASSES, ANNOTATORS = 8, 40_000  # matrices of 10 MB in float32
BATCH = crowdnal.Annotations(
    torch.tensor([0, 2, 5]), torch.tensor([0, 7, 3, 7, 39_998]), torch.tensor([1, 0, 7, 2, 2]),
    num_annotators=ANNOTATORS, num_classes=CLASSES,
)  # fmt: skip
ROWS = torch.randn(2, CLASSES, generator=torch.Generator().manual_seed(0)).log_softmax(1)
LINKS = ["softmax_link", "mixture_link", "joint_link"]


@cache
def matrices(value: float) -> Tensor:
    return torch.full((ANNOTATORS, CLASSES, CLASSES), value)


def gradient(link: str = "mixture_link", scale: float = 1.0, step: bool = True, kind: int = 1) -> Tensor:
    """The gradient of the matrices, all of which are `scale`."""
    op, a = OPS[link + "_step" if step else link], BATCH
    rest = (a.indptr, a.item, a.annotator, a.order, None, a.label)
    options: tuple[Any, ...] = (True,) if link == "softmax_link" else (kind, True)
    inputs = (ROWS, matrices(scale), *(None,) * (3 if link == "softmax_link" else 1), *rest)
    needs = (False, True, False, False) if link == "softmax_link" else (False, True)
    if step:
        without_prior = (None,) * (op.num_tensors - len(inputs))
        return op.overload(*inputs, *without_prior, *options, *needs)[3]
    _, _, *made = op.overload(*inputs, *options)
    return OPS[link + "_backward"].overload(torch.ones(()), None, *inputs, *made, *options, *needs)[1]


@kept
def test_memory_that_nobody_holds_is_taken_over() -> None:
    first = gradient()
    place = first.data_ptr()
    del first
    assert gradient().data_ptr() == place


@pytest.mark.parametrize("hold", ["view", "storage", "numpy", "grad"])
def test_memory_that_somebody_holds_is_left_alone(hold: str) -> None:
    first = gradient(scale=1.0)
    expected, place = first[:10].clone(), first.data_ptr()
    leaf = torch.zeros(ANNOTATORS, CLASSES, CLASSES, requires_grad=True)
    if hold == "grad":
        leaf.grad = first
    holder: Any = {"view": first[:10], "storage": first.untyped_storage(), "numpy": first.numpy(), "grad": leaf}[hold]
    del first
    gc.collect()
    others = [gradient(scale=0.5) for _ in range(3)]
    assert len({place, *(other.data_ptr() for other in others)}) == 4
    if hold == "storage":
        holder = torch.empty(0).set_(holder, 0, (ANNOTATORS, CLASSES, CLASSES), (CLASSES * CLASSES, CLASSES, 1))
    now = holder.grad if hold == "grad" else torch.as_tensor(holder)
    assert_same(now[:10], expected)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("step", [True, False])
def test_nothing_of_what_was_there_is_left(link: str, step: bool) -> None:
    for kind in (0, 1, 2):
        expected = gradient(link, step=step, kind=kind).clone()
        gradient(link, step=step, kind=kind).fill_(torch.nan)
        assert_same(gradient(link, step=step, kind=kind), expected)


@kept
def test_steps_of_training_share_memory_and_hand_it_over() -> None:
    confusion = torch.nn.Parameter(torch.zeros(ANNOTATORS, CLASSES, CLASSES))
    optimizer = torch.optim.SGD([confusion], lr=0.1)
    places, made = set(), set()
    for _ in range(4):
        optimizer.zero_grad(set_to_none=True)
        loss = F.crowd_mixture_nll(ROWS, confusion, BATCH)
        made.add(loss.grad_fn.gradients[1].data_ptr())  # type: ignore[union-attr]
        loss.backward()
        optimizer.step()
        assert confusion.grad is not None
        places.add(confusion.grad.data_ptr())
    assert len(places) == 1 and made == places


def test_threads_get_memory_of_their_own() -> None:
    expected = {scale: gradient(scale=scale)[[0, 3, 7, 39_998]].clone() for scale in (0.0, 0.5, 1.0, 2.0)}
    wrong: list[float] = []

    def work(scale: float) -> None:
        for _ in range(10):
            first, second = gradient(scale=scale), gradient(scale=scale)
            same = first.data_ptr() == second.data_ptr()
            for ours in (first, second):
                if same or not torch.equal(ours[[0, 3, 7, 39_998]], expected[scale]):
                    wrong.append(scale)

    threads = [threading.Thread(target=work, args=(scale,)) for scale in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_block_at_most_is_kept() -> None:
    many = [gradient() for _ in range(6)]
    while many:
        many.pop()
    assert resident() - (before := resident()) < 1  # settled
    many = [gradient() for _ in range(12)]  # 123 MB
    while many:
        many.pop()
    assert resident() - before < 25


def resident() -> float:
    """MB of this process in memory."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6
