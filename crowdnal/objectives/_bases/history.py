"""What the rounds of an objective report, and how a checkpoint holds it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Round(NamedTuple):
    """What a round reports.

    Attributes:
        round: 1, 2, ...
        epoch: before which it took place.
        log_likelihood: of all annotations, under classifier and annotators as the round found them.
        seconds: it took, the predictions included; None after a checkpoint, which is the same bits for the same run.
    """

    round: int
    epoch: int
    log_likelihood: float
    seconds: float | None = None


MOST = 1024
"""Rounds that a state has."""


def to_tensor(history: list[Round]) -> Tensor:
    """``[MOST, 3]`` float64, without the seconds, 0 where there is no round: every checkpoint format holds a tensor.

    Always of the same size, as averages of weights (EMA) pair states entry by entry.
    """
    table = torch.zeros(MOST, 3, dtype=torch.float64)
    made = history[-MOST:]
    table[: len(made)] = torch.tensor([one[:3] for one in made], dtype=torch.float64).view(-1, 3)
    return table


def from_tensor(state: Tensor) -> list[Round]:
    """What `to_tensor` made a tensor of."""
    return [Round(int(number), int(epoch), likelihood) for number, epoch, likelihood in state.tolist() if number > 0]
