"""Few threads where many cost more than they give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_SMALL = 1 << 24
"""Multiply-adds of a step."""


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """So many of torch's threads for a while; None: as many as there are."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_of_step(module: nn.Module, batch_size: int) -> int | None:
    """1 for steps of linear layers that are small, where threads wait for each other longer than they compute."""
    parameters = list(nn.Module.parameters(module))  # of all copies, of one that is cross-fitted
    if any(parameter.device.type != "cpu" for parameter in parameters):
        return None
    return 1 if batch_size * sum(map(torch.Tensor.numel, parameters)) < _SMALL else None
