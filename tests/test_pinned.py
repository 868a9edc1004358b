"""Short training runs have the weights that are pinned: bit for bit where the machine is the same, else nearly."""

from __future__ import annotations

import json

import pinned
import pytest
import torch
from support.compare import assert_close

KNOWN = json.loads(pinned.FILE.read_text())
SAME = pinned.canary() == KNOWN["canary"]
SINGLE = {"ccc", *(name for name in pinned.RUNS if name.startswith("command"))}  # computed in float32


def test_every_run_is_pinned() -> None:
    assert set(KNOWN["runs"]) == set(pinned.RUNS)


@pytest.mark.parametrize("name", pinned.RUNS)
def test_a_run_ends_with_the_weights_that_are_pinned(name: str) -> None:
    found, known = pinned.run(name), KNOWN["runs"][name]
    numbers = [torch.tensor(pin["numbers"], dtype=torch.float64) for pin in (found, known)]
    rtol, atol = (1e-2, 1e-3) if name in SINGLE else (1e-6, 1e-9)
    assert_close(*numbers, rtol=rtol, atol=atol, where=f"{name}, sum and first {pinned.SHOWN} numbers of each tensor")
    assert not SAME or found["sha256"] == known["sha256"], f"{name}: other bits, on the machine that pinned them"


def test_bits_are_told_apart() -> None:
    one = torch.tensor([1.0, 2.0], dtype=torch.float64)
    other = one.nextafter(torch.tensor(3.0, dtype=torch.float64))
    assert pinned.pin([one])["sha256"] == pinned.pin([one.clone()])["sha256"] != pinned.pin([other])["sha256"]
    assert pinned.pin([one])["sha256"] != pinned.pin([one.float()])["sha256"]
