"""What is wrong with the arguments of an op, said by name: where no native kernel checks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

INDEX = {"indptr": "P", "item": "N", "annotator": "N", "order": "N", "plan": "N4", "label": "N", "annotators": "T"}
"""Sizes of the index tensors: P = B + 1, N = nnz. One letter stands for one size wherever it is met, as 4 does."""

_BOUNDS = {"item": "B", "annotator": "R", "annotators": "R", "order": "N", "label": "K"}
"""All values of these are below that size."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MOST = 2**56
"""Elements of a tensor, as the kernels have it: their bytes are a number of 64 bits."""


def problem(op: Any, arguments: Any, *, values: bool = True) -> str | None:
    """The first thing that is wrong with the arguments of an op, None if nothing is.

    Args:
        op: `crowdnal.ops.Op`.
        arguments: named, as `op.arguments` makes them.
        values: also read the index tensors, where they are on the CPU.
    """
    tensors = dict(zip(arguments._fields, arguments[: op.num_tensors], strict=False))
    sizes: dict[str, int] = {}
    for name, size in (("num_annotators", "R"), ("num_labels", "K")):
        number = getattr(arguments, name, 0)
        if number < 0:
            return f"{name} = {number} must not be negative"
        if name in arguments._fields:
            sizes[size] = number
    if getattr(arguments, "normalization", 0) not in (0, 1, 2):
        return f"normalization must be 0 (none), 1 (softmax) or 2 (softplus), got {arguments.normalization}"
    asked = bool(sizes)
    found = _layouts(tensors, op.optional) or _shapes(tensors, op.shapes, sizes) or _dtypes(tensors, op.matrices)
    if found is None and tensors.get("prior") is not None and tensors["labels_given"] is None:
        found = "prior needs labels_given"
    if found is None and asked:  # a result of R, K and C whose first sizes no tensor has
        annotators, labels, columns = sizes["R"], sizes["K"], sizes.get("C", 1)
        if annotators * labels * columns > _MOST:
            found = f"a result of num_annotators = {annotators}, num_labels = {labels}, {columns} columns is too large"
    return found or (_values(tensors, sizes) if values else None)


def devices(tensors: Mapping[str, Any]) -> str | None:
    """Names a tensor that is not where the first one is."""
    first = None
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            first = first or (name, tensor.device)
            if tensor.device != first[1]:
                return f"{name} is on {tensor.device} and {first[0]} on {first[1]}: all belong on one device"
    return None


def _layouts(tensors: Mapping[str, Any], optional: frozenset[str]) -> str | None:
    for name, tensor in tensors.items():
        if tensor is None and name not in optional:
            return f"{name} must be a tensor, got None"
        if tensor is not None and (tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested):
            return f"{name} is {tensor.layout}, {tensor.dtype}: give a dense tensor (to_dense(), dequantize())"
    return devices(tensors)


def _shapes(tensors: Mapping[str, Any], shapes: Mapping[str, str], sizes: dict[str, int]) -> str | None:
    """Learns the sizes from the tensors, in their order, and compares."""
    sizes["4"] = 4
    for name, tensor in tensors.items():
        letters = INDEX.get(name, shapes.get(name))
        if tensor is None or letters is None:
            continue
        if tensor.dim() != len(letters):
            return f"{name} has shape {list(tensor.shape)}, expected {len(letters)} dimensions [{', '.join(letters)}]"
        if name == "indptr":
            if tensor.shape[0] == 0:
                return "indptr is empty: it has one element more than there are items"
            letters, tensor_sizes = "B", [tensor.shape[0] - 1]
        else:
            tensor_sizes = list(tensor.shape)
        for letter, size in zip(letters, tensor_sizes, strict=True):
            if letter == "1":  # a prior of all items
                sizes.setdefault("1", size)
            elif sizes.setdefault(letter, size) != size:
                return f"{name} has shape {list(tensor.shape)}, but {letter} = {sizes[letter]} elsewhere"
    if sizes.get("1", 1) not in (1, sizes.get("B", 1)):
        return f"log_prior has {sizes['1']} rows, expected 1 or B = {sizes['B']}"
    return None


def _dtypes(tensors: Mapping[str, Any], matrices: tuple[str, ...]) -> str | None:
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    stored = next((given[name].dtype for name in matrices), None)
    computed: torch.dtype | None = None  # of all that is no matrix: float32 beside halves
    if stored in _FLOATS:
        computed = torch.promote_types(stored, torch.float32)
    for name, tensor in given.items():
        if name in INDEX:
            wanted = torch.int32 if name == "plan" else torch.int64
            if tensor.dtype != wanted:
                return f"{name} must be {str(wanted).removeprefix('torch.')}, got {tensor.dtype}"
        elif tensor.dtype not in _FLOATS:
            return f"{name} must be a floating-point tensor of 16, 32 or 64 bits, got {tensor.dtype}"
        elif name in matrices and tensor.dtype != stored:
            return f"{name} must be {stored}, as the other matrices are; got {tensor.dtype}"
        elif name not in matrices:
            computed = computed or torch.promote_types(tensor.dtype, torch.float32)
            if tensor.dtype != computed:
                return f"{name} must be {computed}, as the op computes in; got {tensor.dtype}"
    return None


def _values(tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> str | None:
    for name, bound in _BOUNDS.items():
        tensor = tensors.get(name)
        if tensor is None or isinstance(tensor, FakeTensor) or tensor.device.type != "cpu" or tensor.numel() == 0:
            continue
        bad = (tensor < 0) | (tensor >= sizes.get(bound, torch.iinfo(torch.int64).max))
        if bool(bad.any()):
            n = int(bad.nonzero()[0, 0])
            return f"{name}[{n}] = {int(tensor[n])} is out of range [0, {sizes[bound]})"
    indptr, nnz = tensors.get("indptr"), sizes.get("N", 0)
    if indptr is None or isinstance(indptr, FakeTensor) or indptr.device.type != "cpu":
        return None
    if int(indptr[0]) != 0 or int(indptr[-1]) != nnz or bool((indptr.diff() < 0).any()):
        return f"indptr must run from 0 to {nnz} and must not decrease"
    item = tensors.get("item")
    if item is not None:
        rows = torch.repeat_interleave(torch.arange(len(indptr) - 1), indptr.diff())
        if not torch.equal(rows, item):
            return "item must repeat the number of every item as often as indptr says"
    if tensors.get("plan") is None:
        return None
    plan, order = tensors["plan"], tensors["order"]
    for column, name in enumerate(("item", "annotator", "label"), 1):
        if name in tensors and bool((plan[:, column] != tensors[name][order]).any()):
            return f"plan[:, {column}] is not {name}[order]: it is that of other annotations"
    return "plan[:, 0] is not order: it is that of other annotations" if bool((plan[:, 0] != order).any()) else None
