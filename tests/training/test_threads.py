"""Small steps take one thread, and everything after them what it had."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import crowdnal
from crowdnal._utils.threads import threads, threads_of_step


def test_threads_come_back_also_after_an_error() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(KeyError), threads(1):
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 2
        with threads(None):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_large_steps_and_those_of_other_devices_take_all() -> None:
    assert threads_of_step(nn.Linear(1280, 10), 64) == 1
    assert threads_of_step(nn.Linear(4096, 1000), 64) is None
    assert threads_of_step(nn.Linear(4, 2, device="meta"), 8) is None


def test_compare_trains_small_heads_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    step = torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda *a: (seen.add(torch.get_num_threads()), step(*a))[1])
    truth = torch.arange(40) % 2
    annotations = crowdnal.simulation.simulate(truth, crowdnal.simulation.symmetric_confusions(4, 2, 0.8))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        crowdnal.compare(torch.randn(40, 3), annotations, [], epochs=1)
        assert seen == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
