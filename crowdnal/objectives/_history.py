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
        seconds: it took, the predictions included.
    """

    round: int
    epoch: int
    log_likelihood: float
    seconds: float


def to_tensor(history: list[Round]) -> Tensor:
    """``[T, 4]`` float64: every checkpoint format can hold a tensor."""
    return torch.tensor(history, dtype=torch.float64).view(-1, len(Round._fields))


def from_tensor(state: Tensor) -> list[Round]:
    """What `to_tensor` made a tensor of."""
    return [Round(int(number), int(epoch), *rest) for number, epoch, *rest in state.tolist()]
