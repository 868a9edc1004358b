"""A column of any library, numbered: codes and the distinct values they stand for."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from crowdnal.data._numbering import first_rows, number_texts, texts_of
from crowdnal.data._vocabulary import Array, is_number, plain


class Column(NamedTuple):
    """``codes [n]`` into ``values``, -1 where missing; ``declared`` where the values' order is the owner's."""

    codes: Array
    values: list[Any]
    declared: bool = False

    def mapped(self, change: Callable[[Any], Any]) -> Column:
        """The same column of other values: None is missing, values that became equal are one."""
        index: dict[Any, int] = {}
        changed = [change(value) for value in self.values]
        place = [-1 if value is None else index.setdefault(value, len(index)) for value in changed]
        if place == list(range(len(place))):
            return self._replace(values=changed)
        return self._replace(codes=np.array([*place, -1], dtype=np.int64)[self.codes], values=list(index))

    def by_appearance(self) -> Column:
        """Only the values that occur, in order of first appearance."""
        size = len(self.codes)
        if size and int(self.codes[0]) == 0 and int(self.codes.max()) + 1 == len(self.values):
            if len(first_rows(self.codes)) == len(self.values):  # every step is of one
                return self
        first = np.full(len(self.values) + 1, size, dtype=np.int64)
        first[self.codes[::-1]] = np.arange(size)[::-1]
        order = np.argsort(first[:-1], kind="stable")[: np.count_nonzero(first[:-1] < size)]
        if len(order) == len(self.values) and (order[1:] > order[:-1]).all():
            return self
        place = np.full(len(self.values) + 1, -1, dtype=np.int64)
        place[order] = np.arange(len(order))
        return Column(place[self.codes], [self.values[u] for u in order.tolist()])


def read_column(raw: Any, name: str = "the column", place: Callable[[int], str] = "row {}".format) -> Column:
    """Number the distinct values of a list, array, tensor, Series or Arrow column; NaN, None and the like are missing.

    Integers kept as floats are integers, and in a column that mixes numbers and text, a text that spells an integer is
    that integer.

    Raises:
        ValueError: for what is no column, and a value that cannot be an id, with its row.
    """
    if isinstance(raw, Tensor):
        raw = raw.detach().cpu()
        raw = (raw.double() if raw.is_floating_point() else raw).numpy()
    if raw is None or isinstance(raw, (str, bytes, Mapping, set, frozenset)) or not hasattr(raw, "__iter__"):
        raise ValueError(f"{name} is {type(raw).__name__}, not a list, array or Series with one value per row")
    if getattr(raw, "ndim", 1) != 1:
        raise ValueError(f"{name}: a column must have one dimension, got shape {list(raw.shape)}")
    if not hasattr(raw, "__len__"):
        raw = list(raw)
    try:
        column = _factorize(raw)
    except TypeError:
        rows = list(raw)
        bad = next((n for n, value in enumerate(rows) if not _is_hashable(value)), 0)
        raise ValueError(f"{place(bad)} is {rows[bad]!r}, which cannot be an id: ids must be hashable") from None
    return _tidy(column)


def _factorize(raw: Any) -> Column:
    library = type(raw).__module__.partition(".")[0]
    if isinstance(raw, np.ma.MaskedArray):
        column = _factorize(np.asarray(raw.data))
        return column._replace(codes=np.where(np.ma.getmaskarray(raw), -1, column.codes)).by_appearance()
    if library == "pandas":
        return _factorize_pandas(raw)
    if library == "pyarrow":
        return _factorize_arrow(raw)
    if library == "polars":
        if type(raw.dtype).__name__ == "Enum":
            codes = raw.to_physical().cast(int).fill_null(-1).to_numpy()
            return Column(codes.astype(np.int64), raw.dtype.categories.to_list(), declared=True)
        raw = raw.to_numpy() if raw.dtype.is_numeric() and not raw.null_count() else raw.to_list()
    elif not isinstance(raw, np.ndarray) and hasattr(raw, "to_numpy"):
        raw = raw.to_numpy()
    if isinstance(raw, np.ndarray) and raw.dtype.kind in "iuf":
        return _factorize_numbers(raw)
    values = raw.tolist() if isinstance(raw, np.ndarray) and raw.dtype.kind in "bUSOV" else list(raw)
    index: dict[Any, int] = {}
    codes = np.fromiter((index.setdefault(value, len(index)) for value in values), np.int64, len(values))
    return Column(codes, list(index))


def _factorize_pandas(raw: Any) -> Column:
    array = getattr(raw, "array", raw)
    if hasattr(array, "categories") and hasattr(array, "codes"):
        values = list(array.categories)
        # What pandas makes of values by itself (sorted, without a rank) is no order that somebody declared.
        declared = array.ordered or not array.categories.is_monotonic_increasing
        return Column(np.asarray(array.codes, dtype=np.int64), values, declared)
    if isinstance(getattr(array, "dtype", None), np.dtype) and array.dtype.kind in "iuf":
        return _factorize_numbers(raw.to_numpy())
    if str(getattr(array, "dtype", "")) in ("str", "string", "large_string[pyarrow]", "string[pyarrow]"):
        if "pyarrow" in sys.modules and hasattr(array, "__arrow_array__"):
            return _factorize_arrow(array.__arrow_array__())
    codes, found = array.factorize()
    return Column(np.asarray(codes, dtype=np.int64), list(found))


def _factorize_arrow(raw: Any) -> Column:
    """An Arrow array, chunked or not."""
    import pyarrow as pa

    if len(raw) and not raw.null_count and (pa.types.is_string(raw.type) or pa.types.is_large_string(raw.type)):
        return Column(*number_texts(raw.chunks if isinstance(raw, pa.ChunkedArray) else [raw]))
    if isinstance(raw, pa.ChunkedArray):
        raw = raw.combine_chunks()
        if isinstance(raw, pa.ChunkedArray):  # too long for one array
            raw = pa.concat_arrays(raw.cast(pa.large_string() if pa.types.is_string(raw.type) else raw.type).chunks)
    if pa.types.is_dictionary(raw.type):
        return Column(_codes(raw), _values(raw.dictionary), declared=bool(raw.type.ordered))
    if raw.null_count == 0 and (pa.types.is_integer(raw.type) or pa.types.is_floating(raw.type)):
        return _factorize_numbers(raw.to_numpy())
    if pa.types.is_nested(raw.type):
        return _factorize(raw.to_pylist())
    return _encoded(raw)


def _encoded(raw: Any) -> Column:
    encoded = raw.dictionary_encode()
    return Column(_codes(encoded), _values(encoded.dictionary))


def _codes(encoded: Any) -> Array:
    """Those of a dictionary array, -1 where there is none."""
    indices = encoded.indices.fill_null(-1) if encoded.null_count else encoded.indices
    codes: Array = indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes


def _values(dictionary: Any) -> list[Any]:
    """Python values of an Arrow array."""
    if str(dictionary.type) in ("string", "large_string"):
        return texts_of(dictionary)
    return dictionary.to_pylist()


def _factorize_numbers(raw: Array) -> Column:
    """Integers of a small range by a table, others by sorting."""
    n = len(raw)
    if raw.dtype.kind != "f" and n and (low := int(raw.min())) + 8 * n + 1024 > int(raw.max()):
        # In 64 bits: the difference of two int8 need not fit 8. (uint64 wraps round, and the difference is right.)
        slot = raw.astype(np.int64) - np.array(low).astype(np.int64)
        first = np.full(int(slot.max()) + 1, n, dtype=np.int64)
        first[slot[::-1]] = np.arange(n)[::-1]
        used = np.flatnonzero(first < n)
        used = used[np.argsort(first[used])]
        code = np.empty(len(first), dtype=np.int64)
        code[used] = np.arange(len(used))
        return Column(code[slot], raw[first[used]].tolist())
    found, first, inverse = np.unique(raw, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(found), dtype=np.int64)
    rank[order] = np.arange(len(found))
    return Column(rank[inverse.reshape(-1)], found[order].tolist())


def _tidy(column: Column) -> Column:
    """Plain Python values; missing ones out; one spelling of a number that is both number and text."""
    if set(map(type, column.values)) in ({str}, {int}):
        return column
    values = [None if is_missing(value) else plain(value) for value in column.values]
    numbers = [is_number(value) for value in values]
    if any(numbers):
        if all(n or value is None for n, value in zip(numbers, values, strict=True)):
            if all(value is None or value % 1 == 0 for value in values):
                values = [None if value is None else int(value) for value in values]
        else:
            values = [
                int(value) if isinstance(value, str) and re.fullmatch(r"0|-?[1-9][0-9]{0,300}", value) else value
                for value in values
            ]
    return column._replace(values=values).mapped(lambda value: value)


def is_missing(value: Any) -> bool:
    """None, NaN, NaT, pd.NA."""
    if value is None:
        return True
    try:
        return bool(value != value)
    except (TypeError, ValueError):  # pd.NA has no truth value
        return type(value).__name__ == "NAType"


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def read_numbers(raw: Any, name: str) -> Array:
    """A column as float64, NaN where there is no number.

    Raises:
        ValueError: it is no column.
    """
    if isinstance(raw, Tensor):
        raw = raw.detach().cpu().double().numpy()
    if isinstance(getattr(raw, "dtype", None), np.dtype) and not isinstance(raw, np.ma.MaskedArray):
        raw = np.asarray(raw)
    if not isinstance(raw, np.ndarray) or isinstance(raw, np.ma.MaskedArray) or raw.dtype.kind not in "iuf":
        column = raw if isinstance(raw, Column) else read_column(raw, name)
        return np.array([*map(_as_float, column.values), np.nan], dtype=np.float64)[column.codes]
    if raw.ndim != 1:
        raise ValueError(f"{name}: a column must have one dimension, got shape {list(raw.shape)}")
    return raw.astype(np.float64)


def _as_float(value: Any) -> float:
    if isinstance(value, str) and "_" not in value:
        try:
            return float(value)
        except ValueError:
            return np.nan
    return float(value) if is_number(value) else np.nan


# Tables


def column_names(data: Any) -> list[Any] | None:
    """Of a DataFrame, an Arrow table, a structured array or a mapping of columns; None for anything else."""
    if isinstance(data, np.ndarray):
        return None if data.dtype.names is None else list(data.dtype.names)
    for attribute in ("columns", "column_names"):
        if hasattr(data, attribute) and not isinstance(data, type):
            names = getattr(data, attribute)
            # Arrow's `columns` are the columns themselves
            if not (attribute == "columns" and hasattr(data, "column_names")):
                return list(names)
    return list(data) if isinstance(data, Mapping) else None
