"""What objectives need of ``torch.distributed``; without it they are alone."""

from __future__ import annotations

import torch
from torch import Tensor


def num_processes() -> int:
    """1 where ``torch.distributed`` is not in use."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def sum_over_processes(statistics: Tensor) -> Tensor:
    """The sum over all processes, in place and the same bits on each."""
    if num_processes() > 1:
        torch.distributed.all_reduce(statistics)
    return statistics
