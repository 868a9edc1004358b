"""FSDP2 gathers a module's parameters when it is called; here also for a method of it."""

from __future__ import annotations

import sys
from typing import Any, cast

from torch import nn


def is_sharded(module: nn.Module) -> bool:
    """Whether ``torch.distributed.fsdp.fully_shard`` has made the module a unit of its own."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # else nobody has
    return fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ()))


def gathering(module: nn.Module, *methods: str) -> Any:
    """The module, whose methods find whole parameters where FSDP2 shards them."""
    if is_sharded(module):
        for name in methods:
            if name not in vars(module):
                from torch.distributed.fsdp import register_fsdp_forward_method

                register_fsdp_forward_method(module, name)
    return cast(Any, module)
