"""Checks of raw values behind ``Annotations``: what is wrong, in which row, and the fix."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from crowdnal.data._fields import Fields
from crowdnal.data._vocabulary import Vocabulary


def check_fields(
    indptr: Any,
    annotator: Any,
    label: Any,
    num_annotators: int,
    num_classes: int,
    weight: Any,
    item_id: Any,
    vocabulary: Any,
) -> Fields:
    """The fields of an ``Annotations``, tensors as int64 (weight: float), or a ValueError that names the row."""
    for name, size in (("num_annotators", num_annotators), ("num_classes", num_classes)):
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or not 0 <= size < 2**63:
            raise ValueError(f"{name} must be an integer, 0 or more (and below 2**63); got {size!r}")
    indptr = integers(indptr, "indptr")
    annotator = integers(annotator, "annotator")
    label = integers(label, "label")
    nnz = annotator.shape[0]
    if label.shape[0] != nnz:
        raise ValueError(f"label has {label.shape[0]} entries, annotator {nnz}; both need one per annotation")
    if indptr.shape[0] == 0:
        raise ValueError("indptr is empty; it has one entry more than there are items: [0] for none")
    if int(indptr[0]) != 0:
        raise ValueError(f"indptr[0] is {int(indptr[0])}; row offsets start at 0")
    down = indptr[1:] < indptr[:-1]
    if bool(down.any()):
        i = _first(down)
        raise ValueError(
            f"indptr decreases at item {i}: {int(indptr[i])} to {int(indptr[i + 1])}; give cumulative counts"
        )
    if int(indptr[-1]) != nnz:
        raise ValueError(f"indptr ends at {int(indptr[-1])} and there are {nnz} annotations; end it with their number")
    _check_range("annotator", annotator, num_annotators, indptr, label)
    _check_range("label", label, num_classes, indptr, annotator)
    if weight is not None:
        try:
            weight = torch.as_tensor(weight)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"weight must be real numbers, one value per annotation; got {weight!r}") from None
        if weight.shape != (nnz,) or weight.is_complex():
            raise ValueError(
                f"weight must be real, [{nnz}], one value per annotation; got {weight.dtype} {list(weight.shape)}"
            )
        weight = weight if weight.is_floating_point() else weight.float()
        bad = ~(torch.isfinite(weight) & (weight >= 0))
        if bool(bad.any()):
            n = _first(bad)
            raise ValueError(
                f"weight of annotation {n} (item {_row(indptr, n)}, annotator {int(annotator[n])}) is "
                f"{float(weight[n])}; weights are finite and not negative, 0 ignores an annotation"
            )
    rows = indptr.shape[0] - 1
    if vocabulary is not None and not isinstance(vocabulary, Vocabulary):
        raise ValueError(f"vocabulary must be a crowdnal.Vocabulary, got {type(vocabulary).__name__}")
    if item_id is not None:
        item_id = integers(item_id, "item_id")
        if item_id.shape[0] != rows:
            raise ValueError(f"item_id has {item_id.shape[0]} entries for {rows} items; give one per item")
        bad = item_id < 0 if vocabulary is None else (item_id < 0) | (item_id >= len(vocabulary.items))
        if bool(bad.any()):
            i = _first(bad)
            raise ValueError(
                f"item_id of item {i} is {int(item_id[i])}, which is no row of the full data set; "
                "give row numbers from 0"
            )
    if vocabulary is not None:
        _check_vocabulary(vocabulary, num_annotators, num_classes, rows, item_id is None)
    tensors = [t for t in (indptr, annotator, label, weight, item_id) if t is not None]
    if len({t.device for t in tensors}) > 1:
        raise ValueError("indptr, annotator, label, weight and item_id must be on one device")
    sizes = int(num_annotators), int(num_classes)
    return Fields(*sizes, indptr, annotator, label, weight, item_id, vocabulary)


def _check_vocabulary(vocabulary: Any, num_annotators: int, num_classes: int, rows: int, all_items: bool) -> None:
    wanted = [("annotators", num_annotators), ("classes", num_classes)]
    if all_items:
        wanted.append(("items", rows))
    for name, size in wanted:
        if len(getattr(vocabulary, name)) != size:
            raise ValueError(
                f"vocabulary.{name} has {len(getattr(vocabulary, name))} ids for {size} {name}; give one each"
            )


def _check_range(name: str, values: Tensor, size: int, indptr: Tensor, other: Tensor) -> None:
    bad = (values < 0) | (values >= size)
    if not bool(bad.any()):
        return
    n, low, high = _first(bad), int(values.min()), int(values.max())
    if low >= 1 and high == size:
        hint = f"{name}s look 1-based: subtract 1"
    elif low < 0 and name == "annotator":
        hint = "a negative number is not read as the last annotator: leave out that annotation or renumber"
    elif low < 0:
        hint = "leave out missing annotations instead of marking them (from_dense takes a marker)"
    else:
        hint = f"raise num_{'classes' if name == 'label' else 'annotators'} or renumber from 0"
    beside = f"annotator {int(other[n])}" if name == "label" else f"label {int(other[n])}"
    raise ValueError(
        f"{name} of annotation {n} (item {_row(indptr, n)}, {beside}) is {int(values[n])}, outside [0, {size}); {hint}"
    )


def _first(mask: Tensor) -> int:
    return int(mask.nonzero()[0, 0])


def _row(indptr: Tensor, n: int) -> int:
    return int(torch.searchsorted(indptr, n, right=True)) - 1


def integers(values: Any, name: str) -> Tensor:
    """1-d int64 tensor of values that are integers already (whatever their dtype)."""
    if not isinstance(values, Tensor):
        try:
            array = np.asarray(values)
        except ValueError:  # lists among the numbers
            array = np.array([*values, None], dtype=object)[:-1]
        if array.dtype.kind not in "iufb" and array.size:
            i, first = next(
                ((i, v) for i, v in enumerate(array.ravel().tolist()) if not isinstance(v, (int, float))),
                (0, array.ravel()[0]),
            )
            raise ValueError(f"{name}[{i}] is {first!r}; integers are needed here, and from_long reads any kind of id")
        values = torch.from_numpy(np.require(array if array.size else array.astype(np.int64), requirements=["C", "W"]))
    if values.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {list(values.shape)}; flatten it")
    if values.is_complex():
        raise ValueError(f"{name} must hold integers, got {values.dtype}")
    if values.is_floating_point():
        bad = ~(values == values.round()) | ~torch.isfinite(values)
        if bool(bad.any()):
            i = _first(bad)
            raise ValueError(f"{name}[{i}] is {float(values[i])}, no integer; leave out missing values, round others")
    return values.to(torch.int64)


def check_rows(index: Any, size: int) -> Tensor:
    """Row numbers from a list, array, integer tensor or boolean mask; negative ones count from the end."""
    try:
        rows = torch.as_tensor(index)
    except (TypeError, ValueError, RuntimeError):
        raise IndexError(f"index items by integers, a slice or a mask, got {index!r}") from None
    if rows.numel() == 0 and rows.dtype != torch.bool:
        return torch.empty(0, dtype=torch.int64, device=rows.device)
    if rows.ndim != 1 or rows.is_floating_point() or rows.is_complex():
        raise IndexError(f"index items by one row of integers or a mask, got {rows.dtype} {list(rows.shape)}")
    if rows.dtype == torch.bool:
        if rows.shape[0] != size:
            raise IndexError(f"a mask of {rows.shape[0]} values cannot choose among {size} items")
        return rows.nonzero()[:, 0]
    rows = rows.to(torch.int64)
    # A GPU checks bounds by itself; reading the values here would wait for it.
    if rows.device.type == "cpu":
        bad = (rows < -size) | (rows >= size)
        if bool(bad.any()):
            raise IndexError(f"item {int(rows[bad][0])} is out of range for {size} items")
    return torch.where(rows < 0, rows + size, rows)
