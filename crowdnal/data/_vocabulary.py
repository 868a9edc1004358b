"""Ids of any hashable kind: their order, and the numbers they go by inside."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

Ids = Sequence[Hashable] | int | None
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, repr=False)
class Vocabulary:
    """Original ids: the position in each tuple is the integer used inside.

    Shared by reference. A data loader's worker sends only the token of its vocabulary with each batch, and
    the main process puts its own object there: millions of ids do not cross the process border every step.
    One that the worker made itself (annotations that a collate function reads) goes along whole.
    """

    items: tuple[Hashable, ...]
    annotators: tuple[Hashable, ...]
    classes: tuple[Hashable, ...]
    token: str = field(default_factory=lambda: uuid4().hex, init=False, compare=False)
    made_by_worker: bool = field(default_factory=lambda: get_worker_info() is not None, init=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("items", "annotators", "classes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _known[self.token] = self

    def __repr__(self) -> str:
        sizes = (len(self.items), len(self.annotators), len(self.classes))
        return "Vocabulary({} items, {} annotators, {} classes)".format(*sizes)

    def __reduce__(self) -> tuple[Any, ...]:
        if get_worker_info() is not None and not self.made_by_worker:
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


# The path that a pickle keeps, whatever the file is called.
restore_vocabulary.__module__ = "crowdnal.data"
torch.serialization.add_safe_globals([restore_vocabulary])


def is_number(value: Any) -> bool:
    """A number of Python or numpy, not a truth value."""
    return isinstance(value, (int, float, np.number, Decimal)) and not isinstance(value, bool)


def natural_key(value: Any) -> tuple[Any, ...]:
    """Sort key: numbers (also those written as text) by value, then text with its digits as numbers, then the rest."""
    if isinstance(value, str):
        if len(value) < 400 and re.fullmatch(r"-?\d+(\.\d+)?", value):
            return (0, Decimal(value), value)
        parts = re.split(r"(\d{1,400})", value)
        return (1, tuple((0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts if p), value)
    if is_number(value) or isinstance(value, bool):
        return (0, value, "")
    if isinstance(value, tuple):
        return (2, tuple(map(natural_key, value)))
    if isinstance(value, frozenset):
        return (2, tuple(sorted(map(natural_key, value))))
    return (3, type(value).__name__, value)


def in_natural_order(values: Iterable[Any]) -> list[Any]:
    """Sorted by :func:`natural_key`; as they come where they cannot be compared."""
    values = list(values)
    try:
        return sorted(values, key=natural_key)
    except TypeError:
        return values


_MOST = 2**28
"""As many ids are made of a number at most: each takes 36 bytes."""


def distinct(values: Any, name: str) -> tuple[Hashable, ...]:
    """The ids as a tuple of plain Python values, each once; an int n means range(n).

    Raises:
        ValueError: naming what is no list of ids, or the id that occurs twice.
    """
    if isinstance(values, (int, np.integer)) and not isinstance(values, bool):
        if not 0 <= values <= _MOST:
            raise ValueError(f"{name}={values} must be 0 to {_MOST}: a list of ids, or how many there are")
        return tuple(range(int(values)))
    if isinstance(values, str):
        raise ValueError(f"{name} is the string {values!r}; give a list of ids, or how many there are")
    try:
        ids = tuple(map(plain, values.tolist() if hasattr(values, "tolist") else values))
        seen: dict[Hashable, int] = {}
        for i, value in enumerate(ids):
            if value in seen:
                raise ValueError(f"{name}[{i}] is {value!r}, as is {name}[{seen[value]}]; ids must differ")
            seen[value] = i
    except TypeError:
        raise ValueError(f"{name} is {values!r}; give a list of hashable ids, or how many there are") from None
    return ids


def plain(value: Any) -> Any:
    """A scalar of numpy as Python's own, where that loses nothing."""
    return value.item() if isinstance(value, (np.number, np.bool_, np.str_, np.bytes_)) else value


def as_array(values: Sequence[Any]) -> Array:
    """Ids as int64 where all are integers, float64 where all are numbers, else as objects."""
    if all(map(is_number, values)):
        whole = all(isinstance(value, (int, np.integer)) for value in values)
        try:
            return np.array(values, dtype=np.int64 if whole else np.float64)
        except OverflowError:
            pass
    column = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        column[i] = value
    return column


def decode(codes: Tensor, ids: tuple[Hashable, ...] | None) -> Array:
    """Original ids of a tensor of codes, or the integers themselves where there are no ids."""
    array = codes.cpu().numpy()
    return array if ids is None else as_array(ids)[array]
