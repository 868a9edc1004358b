"""What objectives need of ``torch.distributed``; without it they are alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


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


def sum_together(tensors: Iterable[Tensor]) -> None:
    """The sums over all processes, in place, in one message for each dtype; all have tensors of the same shapes."""
    if num_processes() == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        joined = sum_over_processes(torch.cat([tensor.reshape(-1) for tensor in same]))
        for tensor, part in zip(same, joined.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(part.view_as(tensor))


def from_first(module: nn.Module) -> None:
    """Parameters and buffers as the first process has them."""
    if num_processes() > 1:
        for tensor in module.state_dict(keep_vars=True).values():
            if isinstance(tensor, Tensor):
                torch.distributed.broadcast(tensor.detach(), 0)


def assign(parameter: Tensor, values: Tensor) -> None:
    """``parameter.copy_(values)``, the same on every process; where FSDP2 shards the parameter each keeps its part."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = parameter
        values = values.to(sharded.device, sharded.dtype)
        values = distribute_tensor(values, sharded.device_mesh, sharded.placements)
    parameter.copy_(values)
