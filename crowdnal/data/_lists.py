"""Tables with an item per row and its annotators as a list, their labels as another beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from crowdnal.data._columns import Column, is_missing
from crowdnal.data._table import Table


def one_per_row(table: Table, worker: Any, needed: Sequence[Any]) -> Table:
    """The table with a row per answer, where cells of the worker's column are lists; else as it is.

    Args:
        table: of single cells, or of lists.
        worker: name of the column that says which.
        needed: names of all columns that are read: single cells are repeated.

    Raises:
        ValueError: two columns, or two lists of a row, are not as long as each other.
    """
    raw = table.columns.get(worker)
    if raw is None or isinstance(raw, Column) or not _has_lists(raw):
        return table
    owners = [_listed(cell) for cell in _cells(raw)]
    sizes = [0 if cells is None else len(cells) for cells in owners]
    row = np.repeat(np.arange(len(owners)), sizes)
    columns: dict[Any, list[Any]] = {worker: [cell for cells in owners for cell in cells or ()]}
    for name in needed:
        if name in table.columns and name != worker:
            columns[name] = _spread(list(_cells(table.column(name))), sizes, name, worker, table.place)
    return Table(columns, table.source, lambda n: table.place(int(row[n])), table.written)


def _spread(cells: list[Any], sizes: list[int], name: Any, worker: Any, place: Callable[[int], str]) -> list[Any]:
    if len(cells) != len(sizes):
        raise ValueError(f"column {name!r} has {len(cells)} rows and {worker!r} has {len(sizes)}; they must be as long")
    found: list[Any] = []
    for n, (cell, size) in enumerate(zip(cells, sizes, strict=True)):
        several = _listed(cell)
        if several is None:
            found += [cell] * size
        elif len(several) != size:
            raise ValueError(f"{place(n)}: {worker!r} has {size} entries and {name!r} {len(several)}: give one each")
        else:
            found += several
    return found


def _has_lists(raw: Any) -> bool:
    kind = getattr(raw, "type", getattr(raw, "dtype", None))
    if kind is not None and str(kind) != "object":
        return "list" in str(kind).lower()
    if not hasattr(raw, "__iter__") or not hasattr(raw, "__len__") or isinstance(raw, (str, bytes)):
        return False
    return _listed(next((cell for cell in raw if not _is_none(cell)), None)) is not None


def _is_none(cell: Any) -> bool:
    return _listed(cell) is None and is_missing(cell)


def _cells(raw: Any) -> Any:
    return raw.to_pylist() if hasattr(raw, "to_pylist") else raw.to_list() if hasattr(raw, "to_list") else raw


def _listed(cell: Any) -> list[Any] | None:
    return list(cell) if isinstance(cell, (list, np.ndarray)) and getattr(cell, "ndim", 1) == 1 else None
