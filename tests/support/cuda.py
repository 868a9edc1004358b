"""The ops on a GPU, their arguments and sizes. A test module that imports this is skipped without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from support.op_arguments import ALL
from support.op_checks import as_tuple

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

ops = torch.ops.crowdnal
DEVICE = "cuda"
# (B, R, C, K, annotations an item): every tier, long segments, many annotators
SIZES = [
    (0, 3, 2, 2, 1),
    (64, 9, 8, 8, 6),
    (3, 1, 5, 7, 4000),
    (200, 40, 18, 30, 5),
    (40, 5, 33, 130, 9),
    (500, 2000, 9, 10, 5),
]
each_op = pytest.mark.parametrize("name", ALL)


def to_device(args: Any, device: str = DEVICE) -> Any:
    return tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)


def on_device(name: str) -> Callable[..., tuple[Tensor, ...]]:
    """The op on the device, for arguments and results on the CPU."""
    return lambda *args: to_device(as_tuple(getattr(ops, name)(*to_device(args))), "cpu")


def spread(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor) or tensor.dim() == 0:
        return tensor
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]
