"""Where a CUDA kernel gets no memory the error is torch's own, which trainers catch to try a smaller batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from support.emulated import NAME, Emulated
from support.op_arguments import ALL, arguments
from support.op_checks import leaf
from support.problems import make_problem

import crowdnal.functional as F
from crowdnal.ops import OPS

pytestmark = pytest.mark.slow  # the kernels of CUDA are compiled for it
TOLD = r"^CUDA out of memory\. crowdnal: tried to allocate a tensor of shape \[(\d+(, \d+)*)?\]$"


@pytest.fixture
def short(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """The ops of CUDA on the emulator, and how many bytes an output may have."""
    for name in OPS:
        monkeypatch.setattr(torch.ops.crowdnal, name, getattr(getattr(torch.ops, NAME), name))
    yield emulated.limit
    emulated.limit(2**63 - 1)


@pytest.mark.parametrize("name", [name for name in ALL if name != "select"])
def test_every_op(short: Callable[[int], None], name: str) -> None:
    args = arguments(make_problem(6, 3, 4, 4, 3, seed=5), name)[0]
    short(2**63 - 1)
    OPS[name](*args)
    short(7)
    with pytest.raises(torch.OutOfMemoryError, match=TOLD):
        OPS[name](*args)


def test_in_the_backward_pass(short: Callable[[int], None]) -> None:
    p = make_problem(6, 3, 4, 4, 3, seed=5)
    loss = F.crowd_cross_entropy(leaf(p.scores), leaf(p.confusion), p.annotations, reduction="none").sum()
    short(7)
    with pytest.raises(torch.OutOfMemoryError, match=TOLD):
        loss.backward()
