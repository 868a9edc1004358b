"""Rows of Hugging Face's ``datasets``: an item per row, its annotators and their labels as lists side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from crowdnal.data._binary import ARROW, PARQUET, magic_of, read_arrow
from crowdnal.data._table import Table, records
from crowdnal.data.formats import Head, register
from crowdnal.data.formats._shared import listed, read_json


def read_records(path: Path, tool: str) -> tuple[list[Mapping[str, Any]], Callable[[int], str]]:
    """The records of a file of JSON, JSON lines, Parquet or Arrow, and where record n is."""
    magic = magic_of(path)
    if magic in (PARQUET, ARROW):
        return read_arrow(path, magic).to_pylist(), lambda n: f"{path}, row {n}"
    value, place = read_json(path, tool)
    return listed(value, path, tool), place


def _is_rows_of_lists(head: Head) -> bool:
    if not isinstance(head.record, Mapping):
        return False
    sizes = [len(cells) for _, cells in _lists(head.record)]
    return any(sizes.count(size) > 1 for size in sizes)


@register("datasets", detect=_is_rows_of_lists)
def read(path: Path) -> Table:
    """JSON lines or Parquet; ``worker=`` and ``label=`` name two lists of a row that are as long as each other.

    Lists of records, or records of lists, are columns such as ``annotations.worker``. ``task`` is the number of the
    row, unless there is such a column.
    """
    found, place = read_records(path, "datasets")
    rows = []
    for n, record in enumerate(found):
        single = {name: cell for name, cell in record.items() if not isinstance(cell, (list, Mapping))}
        rows.append({"task": str(n), **single, **dict(_lists(record))})
    return Table(records(rows), str(path), place)


def _lists(record: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """The columns of a row that have one entry per annotator."""
    for name, cells in record.items():
        if isinstance(cells, Mapping):
            yield from ((f"{name}.{inner}", part) for inner, part in cells.items() if isinstance(part, list))
        elif isinstance(cells, list) and cells and all(isinstance(cell, Mapping) for cell in cells):
            for inner in dict.fromkeys(inner for cell in cells for inner in cell):
                yield f"{name}.{inner}", [cell.get(inner) for cell in cells]
        elif isinstance(cells, list):
            yield name, cells
