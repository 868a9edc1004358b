"""Ids of any hashable kind, numbered: columns of tables to integer codes and back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor
from torch.utils.data import get_worker_info

Ids = Sequence[Hashable] | int | None
Array = np.ndarray[Any, np.dtype[Any]]
Where = Callable[[int], str]


@dataclass(frozen=True, repr=False)
class Vocabulary:
    """Original ids: the position in each tuple is the integer used inside.

    Shared by reference. A data loader's worker sends only the token of its vocabulary with each batch, and
    the main process puts its own object there: millions of ids do not cross the process border every step.
    """

    items: tuple[Hashable, ...]
    annotators: tuple[Hashable, ...]
    classes: tuple[Hashable, ...]
    token: str = field(default_factory=lambda: uuid4().hex, init=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("items", "annotators", "classes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _known[self.token] = self

    def __repr__(self) -> str:
        sizes = (len(self.items), len(self.annotators), len(self.classes))
        return "Vocabulary({} items, {} annotators, {} classes)".format(*sizes)

    def __reduce__(self) -> tuple[Any, ...]:
        if get_worker_info() is not None:
            return _known_vocabulary, (self.token,)
        return restore_vocabulary, (self.token, self.items, self.annotators, self.classes)


_known: WeakValueDictionary[str, Vocabulary] = WeakValueDictionary()


def _known_vocabulary(token: str) -> Vocabulary | None:
    return _known.get(token)


def restore_vocabulary(token: str, *ids: tuple[Hashable, ...]) -> Vocabulary:
    """Unpickle: the object that is here already, or a new one under the same token."""
    known = _known.get(token)
    if known is None:
        known = Vocabulary(*ids)
        object.__setattr__(known, "token", token)
        _known[token] = known
    return known


class Column(NamedTuple):
    """A column of ids, numbered: ``codes [n]``, -1 where missing, into ``values``, in order of appearance."""

    codes: Array
    values: Array


def read_column(raw: Any, missing: Any = (), where: Where = str) -> Column:
    """Number the distinct values of a column; NaN, None, pd.NA and the markers are missing."""
    codes, values = _factorize(raw, where)
    marked = markers(missing)
    gone = (_is_missing(value) or any(value == marker for marker in marked) for value in values)
    absent = np.fromiter(gone, bool, len(values))
    if absent.any():
        renumbered = np.append(np.where(absent, -1, np.cumsum(~absent) - 1), -1)
        codes, values = renumbered[codes], [v for v, gone in zip(values, absent, strict=True) if not gone]
    return Column(codes, narrow(values))


def markers(missing: Any) -> list[Any]:
    """One or several markers as a list, without those that mean missing anyway."""
    several = missing if isinstance(missing, (list, tuple, set, frozenset)) else (missing,)
    return [marker for marker in several if not _is_missing(marker)]


def _is_missing(value: Any) -> bool:
    if value is None:
        return True
    try:
        return bool(value != value)
    except TypeError:  # pd.NA
        return True


def is_number(value: Any) -> bool:
    """A number of Python or numpy, not a truth value."""
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def narrow(values: Sequence[Any]) -> Array:
    """The values as int64 where all are integers, float64 where all are numbers, else as objects."""
    column = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        column[i] = value
    if not all(map(is_number, values)):
        return column
    if all(isinstance(value, (int, np.integer)) or float(value).is_integer() for value in values):
        try:
            return np.fromiter(map(int, values), np.int64, len(values))
        except OverflowError:
            return column
    return column.astype(np.float64)


def encode(column: Column, wanted: Ids, name: str, *, sort: bool, where: Where) -> tuple[Array, tuple[Hashable, ...]]:
    """Number each value by its place in ``wanted``, or among those found; also returns all ids.

    Missing values stay -1.
    """
    found = column.values.tolist()
    if wanted is not None:
        ids = distinct(wanted, name)
        index = {value: i for i, value in enumerate(ids)}
        rank = np.fromiter((index.get(value, -1) for value in found), np.int64, len(found))
        if (rank < 0).any():
            u = int((rank < 0).argmax())
            row = int((column.codes == u).argmax())
            raise ValueError(f"{where(row)}: {found[u]!r} is not in {name}; {_advice(found, u, ids, name)}")
    else:
        order = list(range(len(found)))
        if sort:
            try:
                order.sort(key=found.__getitem__)
            except TypeError:
                order = list(range(len(found)))
        ids = tuple(found[u] for u in order)
        rank = np.empty(len(found), dtype=np.int64)
        rank[order] = np.arange(len(found))
    return np.append(rank, -1)[column.codes], ids


def _advice(found: list[Any], u: int, ids: tuple[Hashable, ...], name: str) -> str:
    numbered = ids == tuple(range(len(ids))) and all(isinstance(value, int) for value in found)
    if numbered and min(found) >= 1 and max(found) == len(ids):
        return f"the values look 1-based: subtract 1, or give the ids themselves as {name}"
    if str(found[u]) in {str(value) for value in ids}:
        return "ids of another type do not match (3 is not '3'): convert one side"
    return "add it there or drop the row"


def distinct(values: Sequence[Hashable] | int, name: str) -> tuple[Hashable, ...]:
    """The ids as a tuple of plain Python values, each once; an int n means range(n)."""
    if isinstance(values, (int, np.integer)):
        return tuple(range(int(values)))
    if isinstance(values, (str, bytes)):
        raise ValueError(f"{name} is the string {values!r}; give a list of ids, or how many there are")
    plain = values.tolist() if isinstance(values, (Tensor, np.ndarray)) else values
    ids = tuple(value.item() if isinstance(value, np.generic) else value for value in plain)
    seen: dict[Hashable, int] = {}
    for i, value in enumerate(ids):
        if value in seen:
            raise ValueError(f"{name}[{i}] is {value!r}, as is {name}[{seen[value]}]; ids must differ")
        seen[value] = i
    return ids


def _factorize(raw: Any, where: Where) -> tuple[Array, list[Any]]:
    """Codes and distinct values in order of first appearance; a Series has its missing values at -1."""
    if isinstance(raw, Tensor):
        raw = raw.detach().cpu().numpy()
    if getattr(raw, "ndim", 1) != 1:
        raise ValueError(f"a column must have one dimension, got shape {list(raw.shape)}")
    try:
        if hasattr(raw, "factorize"):
            codes, found = raw.factorize()
            return codes.astype(np.int64, copy=False), list(found)
        if hasattr(raw, "to_numpy"):
            raw = raw.to_numpy()
        if isinstance(raw, np.ndarray) and raw.dtype.kind in "iuf":
            return _factorize_numbers(raw)
        plain = raw.tolist() if isinstance(raw, np.ndarray) and raw.dtype.kind in "bUSO" else list(raw)
        values = list(dict.fromkeys(plain))
    except TypeError:
        bad = next(i for i, value in enumerate(raw) if not _is_hashable(value))
        raise ValueError(f"{where(bad)} cannot be an id: ids must be hashable") from None
    index = {value: i for i, value in enumerate(values)}
    return np.fromiter(map(index.__getitem__, plain), np.int64, len(plain)), values


def _factorize_numbers(raw: Array) -> tuple[Array, list[Any]]:
    n = len(raw)
    if raw.dtype.kind != "f" and n and int(raw.max()) - int(raw.min()) < 8 * n + 1024:
        slot = (raw - raw.min()).astype(np.int64, copy=False)
        first = np.full(int(slot.max()) + 1, n, dtype=np.int64)
        first[slot[::-1]] = np.arange(n)[::-1]
        used = np.flatnonzero(first < n)
        used = used[np.argsort(first[used])]
        code = np.empty(len(first), dtype=np.int64)
        code[used] = np.arange(len(used))
        return code[slot], raw[first[used]].tolist()
    found, first, inverse = np.unique(raw, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(found), dtype=np.int64)
    rank[order] = np.arange(len(found))
    return rank[inverse.reshape(-1)], found[order].tolist()


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def decode(codes: Tensor, ids: tuple[Hashable, ...] | None) -> Array:
    """Original ids of a tensor of codes, or the integers themselves where there are no ids."""
    array = codes.cpu().numpy()
    return array if ids is None else narrow(ids)[array]
