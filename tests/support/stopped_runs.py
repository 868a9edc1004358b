"""Runs of one of several processes that do not end as they should: here, so that a spawned one can import them."""

from __future__ import annotations

import os

import pytest

from crowdnal.objectives import CrowdLayer
from support.small_run import go


def resumed_after_a_stop(settings) -> None:
    real, count = CrowdLayer._loss, 0

    def loss(self, *inputs):
        nonlocal count
        count += 1
        if count > 8:
            raise KeyboardInterrupt
        return real(self, *inputs)

    CrowdLayer._loss = loss
    with pytest.raises(BaseException, match="torchrun --nproc-per-node 2 -m crowdnal train|another process"):
        go(settings)
    CrowdLayer._loss = real


def going_on(settings) -> None:
    go(settings, resume=True)


def second_dies(settings) -> None:
    real, count = CrowdLayer._loss, 0

    def loss(self, *inputs):
        nonlocal count
        count += 1
        if count > 8 and os.environ["RANK"] == "1":
            os._exit(9)  # killed, without a word
        return real(self, *inputs)

    CrowdLayer._loss = loss
    go(settings)
