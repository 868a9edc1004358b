"""Matrices of labels in delimited text: with or without a header, and whether a table looks like one at all."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from crowdnal.data._columns import Column
from crowdnal.data._csv import Progress, read_delimited
from crowdnal.data._dense import Matrix, of_columns
from crowdnal.data._labels import WORDS, as_number, markers, spelled
from crowdnal.data._text import Dialect, Text


def is_headless(header: list[str]) -> bool:
    """Whether the first row is one of labels, not of names."""
    indexed = not header[0] and all(header[1:])  # as DataFrame.to_csv names the index
    return not indexed and all(not cell or cell.casefold() in WORDS or _is_numeral(cell) for cell in header)


def _is_numeral(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


def read_matrix_of(
    text: Text, dialect: Dialect, missing: Any, names: list[str] | None = None, progress: Progress | None = None
) -> Matrix:
    """The matrix that a table is: a row per item, after a header a first column of items and one per worker.

    Raises:
        ValueError: a worker or an item has no name, or one that occurs twice.
    """
    path, header = text.path, dialect.header
    headed = names is None and not is_headless(header)
    names = header if names is None else names
    marked = {spelled(marker) for marker in markers(missing)} or {"-1"}
    if headed:
        for r, name in enumerate(names[1:], 1):
            twice = name in names[1:r]
            if twice or not name or spelled(name) in marked:
                what = "occurs twice" if twice else "is no name of a worker"
                raise ValueError(
                    f"{path}, line 1: column {name!r} {what}: the first line must name the tasks' column and then each "
                    "worker once"
                )
    table = read_delimited(text, dialect, range(len(header)), range(len(header)), headed=headed, progress=progress)
    columns: list[Column] = list(table.columns.values())
    if not headed:
        return of_columns(columns, None, list(range(len(header))), table.place)
    tasks = columns[0]
    if (tasks.codes < 0).any():
        n = int((tasks.codes < 0).argmax())
        raise ValueError(f"{table.place(n)}, column {names[0]!r} is missing, and only labels may be: name the task")
    return of_columns(columns[1:], [tasks.values[code] for code in tasks.codes], names[1:], table.place)


def each_row_once(matrix: Matrix) -> Matrix:
    """The matrix, if no item has two rows."""
    if matrix.items is not None and len(set(matrix.items)) < len(matrix.items):
        n, task = next((n, task) for n, task in enumerate(matrix.items) if task in matrix.items[:n])
        assert matrix.where is not None
        raise ValueError(f"{matrix.where(n)}: task {task!r} has a row already; give it one")
    return matrix


def is_matrix(matrix: Matrix, missing: Any) -> bool:
    """Whether the cells look like labels."""
    assert matrix.cells is not None
    marked = {spelled(marker) for marker in markers(missing)} or {"-1"}
    codes = matrix.cells.codes.reshape(matrix.shape)
    none = {
        u for u, value in enumerate(matrix.cells.values) if str(value).casefold() in WORDS or spelled(value) in marked
    }
    columns = [set(np.unique(codes[:, r]).tolist()) - {-1} - none for r in range(matrix.shape[1])]
    named = [{spelled(matrix.cells.values[u]) for u in column} for column in columns if column]
    return share_values(named, int((~np.isin(codes, [-1, *none])).sum()))


def share_values(columns: list[set[Any]], cells: int) -> bool:
    """Whether columns look like labels of one set: few values, most of them in several columns."""
    values = Counter(value for column in columns for value in column)
    if cells < 6 or len(columns) < 2:
        return len({as_number(str(value)) is None for value in values}) <= 1
    return 2 * sum(count > 1 for count in values.values()) >= len(values) and 2 * len(values) <= cells
