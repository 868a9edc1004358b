"""A device without a GPU: tensors that say they are elsewhere and hold their numbers in the CPU's memory.

What would fail on a GPU fails here: an op on tensors of both devices. What would wait for a GPU is written down.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("meta")  # every build of torch can differentiate there
CPU = torch.device("cpu")
aten = torch.ops.aten
WAITS = {  # ops whose result, or its size, the host has to know
    *(aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default),
    *(aten.masked_select.default, aten.unique_consecutive.default, aten._unique2.default, aten.unique_dim.default),
    *(aten.bincount.default, aten.histc.default, aten.allclose.default),
}


class Elsewhere(Tensor):
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset()} if not held.is_sparse else {}
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, held.shape, dtype=held.dtype, device=DEVICE, requires_grad=held.requires_grad, **layout
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held.detach()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {}, [])


def run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], waits: list[str]) -> Any:
    given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
    there = [a for a in given if isinstance(a, Elsewhere)]
    moves = func in (aten._to_copy.default, aten.copy_.default, aten._to_sparse.default)
    indexes = func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
    if there and not moves and not (indexes and isinstance(args[0], Elsewhere)):  # whose indices may be on the CPU
        mixed = [tuple(a.shape) for a in given if not isinstance(a, Elsewhere) and a.dim() > 0]
        if mixed:
            raise RuntimeError(f"{func}: tensors of shape {mixed} are on the CPU, others on the device")
    masks = indexes and any(a.dtype in (torch.bool, torch.uint8) for a in tree_leaves(args[1]) if isinstance(a, Tensor))
    target = kwargs.get("device")
    leaves_device = func is aten._to_copy.default and there and target == CPU
    sized = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
    if there and (func in WAITS or sized or masks or leaves_device or (indexes and len(there) < len(given))):
        waits.append(str(func))
    if there and func is aten.copy_.default and not isinstance(args[0], Elsewhere):
        waits.append(str(func))
    plain = tree_map_only(Elsewhere, lambda a: a.held, (args, dict(kwargs)))
    if target is not None and torch.device(target).type == DEVICE.type:
        plain[1]["device"] = CPU
    out = func(*plain[0], **plain[1])
    if target is None:
        made = bool(there) if func is not aten.copy_.default else isinstance(args[0], Elsewhere)
    else:
        made = torch.device(target).type == DEVICE.type
    if not made:
        return out
    known = {id(a.held): a for a in there}
    return tree_map_only(Tensor, lambda a: known[id(a)] if id(a) in known else Elsewhere(a), out)


class OtherDevice(TorchDispatchMode):
    """Makes what is asked for on `DEVICE`; `waits` are the ops that waited for it, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __enter__(self) -> OtherDevice:
        self.autocast = torch.autocast  # which does not know the device
        patched = lambda device_type, **kwargs: self.autocast("cpu" if device_type == "meta" else device_type, **kwargs)  # noqa: E731
        torch.autocast = patched  # type: ignore[misc, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.autocast = self.autocast  # type: ignore[misc]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {}, self.waits)
