"""Delimited text to numbered columns: pandas parses; what it would let pass in silence is looked for here."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from crowdnal._utils.extras import require
from crowdnal.data._arrow_csv import read_clean
from crowdnal.data._columns import Column, read_column
from crowdnal.data._table import Table, as_ids
from crowdnal.data._text import Dialect, Text, readable
from crowdnal.data._vocabulary import Array

Progress = Callable[[int], None]


def read_delimited(
    text: Text,
    dialect: Dialect,
    names: Sequence[Any],
    wanted: Sequence[Any],
    *,
    headed: bool,
    progress: Progress | None = None,
) -> Table:
    """The wanted columns of a delimited file as text, numbered; empty cells, also those cut off at the end, missing.

    Args:
        text: the file.
        dialect: how it is a table.
        names: of all its columns.
        wanted: of those to read.
        headed: whether the first row has the names. Rows that repeat them are left out.
        progress: is told how many characters have been read.

    Raises:
        ValueError: naming the line: a row with more cells than there are names, a quote that is never closed, bytes
            that are not in the encoding.
    """
    places = [list(names).index(name) for name in wanted]
    with readable(text.path):
        clean = read_clean(text, dialect, len(names), places, headed, progress)
        if clean is not None:
            return _table(text, dialect, clean, wanted, places, headed)
        try:
            columns, lines = _parse(text, dialect, len(names), places, headed, progress)
            if lines is not None and lines > len(columns[0].codes) + headed:
                fixed = _check_quotes(text, dialect)
                if fixed is not dialect:
                    return read_delimited(text, fixed, names, wanted, headed=headed, progress=progress)
        except UnicodeDecodeError:
            raise text.undecodable() from None
        except (csv.Error, ValueError):  # pandas' ParserError is one
            fixed = _check_quotes(text, dialect)
            if fixed is not dialect:
                return read_delimited(text, fixed, names, wanted, headed=headed, progress=progress)
            _refuse_long_rows(text, dialect, len(names))
            try:
                columns, lines = _parse(text, dialect, len(names), places, headed, progress, lenient=True)
            except (csv.Error, ValueError) as error:
                said = str(error).strip()
                raise ValueError(f"{text.path}: its rows cannot be told apart ({said}): close every quote") from None
    *columns, beyond = columns
    if (beyond.codes >= 0).any():
        _refuse_long_rows(text, dialect, len(names))
    if dialect.separator is None and len(beyond.codes):
        _refuse_short_rows(text, dialect, len(names), columns, places)
    return _table(text, dialect, columns, wanted, places, headed)


def _table(
    text: Text, dialect: Dialect, columns: list[Column], wanted: Sequence[Any], places: list[int], headed: bool
) -> Table:
    columns = list(map(as_ids, columns))
    kept = _kept_rows(columns, [dialect.header[place] for place in places] if headed else None)
    if kept is not None:
        columns = [column._replace(codes=column.codes[kept]).by_appearance() for column in columns]

    def place(n: int) -> str:
        row = n if kept is None else int(kept[n])
        return f"{text.path}, line {_line_of(text, dialect, row + headed)}"

    return Table(dict(zip(wanted, columns, strict=True)), str(text.path), place)


def _parse(
    text: Text,
    dialect: Dialect,
    width: int,
    places: list[int],
    headed: bool,
    progress: Progress | None,
    lenient: bool = False,
) -> tuple[list[Column], int | None]:
    """The columns, behind them what stands beyond the last, and the number of lines if there were quotes."""
    if dialect.separator == "":
        with text.open() as file:
            cells = [cells[0] for _, cells in dialect.rows(file)][headed:]
        return [as_ids(read_column(cells)), Column(np.full(len(cells), -1), [])], None
    pandas = require("pandas", extra="train")
    every = not lenient  # only then pandas refuses rows with more than one cell beyond the last, and drops none
    separator = dialect.separator or " "
    first = separator.join("x" * (width + 1)) + "\n"  # tells pandas how wide a row may be
    with text.open() as file:
        for _ in range(dialect.skip):
            file.readline()
        watched = _Watched(first, file, progress)
        frame = pandas.read_csv(
            watched,
            header=None,
            names=range(width + 1),
            usecols=None if every else [*places, width],
            index_col=False,
            dtype=dict.fromkeys(range(width), str) | {width: "category"},
            na_filter=False,
            sep=dialect.separator or r"\s+",
            skipinitialspace=dialect.separator is not None,
            quoting=csv.QUOTE_MINIMAL if dialect.quoted else csv.QUOTE_NONE,
            engine="c",
        )

    frame = frame.iloc[1 + headed :]
    with ThreadPoolExecutor(4) as pool:
        columns = list(pool.map(lambda at: as_ids(read_column(frame[at])), [*places, width]))
    return columns, watched.lines if watched.quotes else None


class _Watched:
    """A file that pandas reads from after a first line of ours, and what it is seen to hold."""

    def __init__(self, first: str, file: Any, progress: Progress | None) -> None:
        self.first, self.file, self.progress = first, file, progress
        self.lines, self.quotes, self.done = 0, False, 0

    def read(self, size: int = -1) -> str:
        if self.first:
            first, self.first = self.first, ""
            return first
        text: str = self.file.read(size)
        self.lines += text.count("\n")
        self.quotes = self.quotes or '"' in text
        if self.progress is not None:
            self.done += len(text)
            self.progress(self.done)
        return text

    def __iter__(self) -> Any:
        return iter(self.file)


def _kept_rows(columns: list[Column], names: list[str] | None) -> Any:
    """Rows that are neither empty throughout nor the header once more; None for all."""
    gone = _all([(column.codes, -1) for column in columns])
    if names is not None and len(columns) > 1 and all(n in c.values for c, n in zip(columns, names, strict=True)):
        gone |= _all([(column.codes, column.values.index(name)) for column, name in zip(columns, names, strict=True)])
    return np.flatnonzero(~gone) if gone.any() else None


def _all(pairs: list[tuple[Array, int]]) -> Array:
    """Where every array has its number; the last of them are only looked at where the first have theirs."""
    hit: Array = pairs[0][0] == pairs[0][1]
    for codes, code in pairs[1:]:
        if not hit.any():
            break
        hit &= codes == code
    return hit


def _check_quotes(text: Text, dialect: Dialect) -> Dialect:
    """The dialect, without quotes where a tab-separated file has bare ones.

    Raises:
        ValueError: a quote is opened and not closed, or stands in the middle of a cell.
    """
    if not dialect.quoted or not dialect.separator:
        return dialect
    number = 1
    try:
        with text.open() as file:
            for number, _ in dialect.rows(file, strict=True):  # noqa: B007
                pass
    except csv.Error as error:
        if dialect.separator == "\t":
            return replace(dialect, quoted=False)
        raise ValueError(
            f'{text.path}, line {number + 1} or later: a cell starts with " that is not closed as it should be '
            f"({error}): double quotes inside a cell, and end the cell with one"
        ) from None
    return dialect


def _refuse_long_rows(text: Text, dialect: Dialect, width: int) -> None:
    with text.open() as file:
        for number, cells in dialect.rows(file):
            extra = [n for n in range(width, len(cells)) if cells[n]]
            if extra:
                raise ValueError(
                    f"{text.path}, line {number}: {extra[-1] + 1} columns where there are names for {width}: quote "
                    "cells that contain the separator, and name every column (row names need a name too)"
                )


def _refuse_short_rows(text: Text, dialect: Dialect, width: int, columns: list[Column], places: list[int]) -> None:
    """Between blanks no cell is empty: a short row has lost one, nobody knows which."""
    if not any((column.codes < 0).any() for column in columns):
        return
    with text.open() as file:
        for number, cells in dialect.rows(file):
            if len(cells) != width:
                raise ValueError(
                    f"{text.path}, line {number}: {len(cells)} columns where line 1 has {width}: mark what is missing"
                )


def _line_of(text: Text, dialect: Dialect, row: int) -> int:
    with text.open() as file:
        for n, (number, _) in enumerate(dialect.rows(file)):
            if n == row:
                return number
    return row + 1
