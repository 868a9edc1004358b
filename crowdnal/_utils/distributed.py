"""What objectives need of ``torch.distributed``; without it they are alone."""

from __future__ import annotations

from typing import Any

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


def assign(parameter: Tensor, values: Tensor) -> None:
    """``parameter.copy_(values)``, the same on every process; where FSDP2 shards the parameter each keeps its part."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = parameter
        values = values.to(sharded.device, sharded.dtype)
        values = distribute_tensor(values, sharded.device_mesh, sharded.placements)
    parameter.copy_(values)
