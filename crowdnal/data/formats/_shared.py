"""What readers of exports share: files of a folder or an archive, records, cells, rows that do not count."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crowdnal._utils.warn import warn
from crowdnal.data._columns import Column
from crowdnal.data._csv import read_delimited
from crowdnal.data._json import parse_json
from crowdnal.data._table import Table, brief, records
from crowdnal.data._text import read_dialect, read_head, readable

_BROKEN = (zipfile.BadZipFile, NotImplementedError, RuntimeError, UnicodeDecodeError)
"""What zipfile raises: a damaged archive, a compression that it does not know, a password, a name of a file."""


def read_rows(path: Path, needed: Sequence[str], tool: str) -> Table:
    """All columns of a delimited file with a header.

    Raises:
        ValueError: one that the tool always writes is not there.
    """
    text = read_head(path, None)
    dialect = read_dialect(text, needed, None, blanks=False)
    names = list(dict.fromkeys(dialect.header))
    for name in needed:
        if name not in names:
            raise ValueError(f"{path} is no export of {tool}: it has no column {name!r}, only {brief(names)}")
    return read_delimited(text, dialect, dialect.header, names, headed=True)


def read_json(path: Path, tool: str) -> tuple[Any, Callable[[int], str]]:
    """The value in a file of JSON or JSON lines, and where record n of it is.

    Raises:
        ValueError: it is no JSON.
    """
    text = read_head(path, None)
    try:
        with text.open() as file:
            return parsed(file.read(), str(path), tool)
    except UnicodeDecodeError:
        raise text.undecodable() from None


def parsed(content: str, source: str, tool: str) -> tuple[Any, Callable[[int], str]]:
    """The value in the content of a file, and where record n of it is."""
    value, what = parse_json(content, source)
    if value is None:
        raise ValueError(f"{source} is no export of {tool}: it is not JSON")
    return value, lambda n: f"{source}, {what} {n + 1}"


def listed(value: Any, path: Path, tool: str) -> list[Mapping[str, Any]]:
    """The records of a value.

    Raises:
        ValueError: there are none.
    """
    rows = value if isinstance(value, list) else [value]
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(f"{path} is no export of {tool}: it must hold a list of records")
    return rows


def one_per_annotator(path: Path, suffix: str, tool: str) -> Iterator[tuple[str, str, str]]:
    """Annotator, content and name of each file in a folder or archive, where a file is called after its annotator.

    Raises:
        ValueError: there is none.
    """
    files = contents(path, suffix)
    if not files:
        raise ValueError(f"{path} has no file that ends in {suffix}: {tool} writes one per annotator")
    for name, content in files.items():
        yield name.removesuffix(suffix), content, f"{path}/{name}"


def contents(path: Path, suffix: str) -> dict[str, str]:
    """The files of this ending in a folder or archive, by name.

    Raises:
        ValueError: the archive is damaged, or a file is not UTF-8; both are named.
    """
    with readable(path, *_BROKEN):
        if path.is_dir():
            raw = {file.relative_to(path).as_posix(): file.read_bytes() for file in sorted(path.rglob(f"*{suffix}"))}
        else:
            with zipfile.ZipFile(path) as archive:
                raw = {name: archive.read(name) for name in sorted(archive.namelist()) if name.endswith(suffix)}
    found = {}
    for name, content in raw.items():
        try:
            found[name] = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise ValueError(f"{path}/{name}, line {line} is not UTF-8: export it as UTF-8") from None
    return found


def is_several(path: Path) -> bool:
    """Whether it is a folder or an archive."""
    return path.is_dir() or zipfile.is_zipfile(path)


class Rows:
    """A table that grows row by row."""

    def __init__(self, path: Path) -> None:
        self.path, self.cells, self.places = path, list[dict[str, Any]](), list[str]()

    def add(self, place: str, cells: Mapping[str, Any]) -> None:
        """One more row, and where it is."""
        self.cells.append({name: plain_cell(value) for name, value in cells.items()})
        self.places.append(place)

    def table(self, **candidates: Sequence[str]) -> Table:
        """What was added; see :func:`named`."""
        if not self.cells:
            raise ValueError(f"{self.path} has no answers")
        columns = records(self.cells)
        return named(Table(columns, str(self.path), self.places.__getitem__), **candidates)


def plain_cell(value: Any) -> Any:
    """A value of JSON as a cell: text, None, or a set of texts where there are several."""
    if isinstance(value, (list, tuple, set, frozenset)):
        cells = list(dict.fromkeys(str(plain_cell(entry)) for entry in value))
        return None if not cells else cells[0] if len(cells) == 1 else frozenset(cells)
    if value is None or isinstance(value, (str, frozenset)):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)


def named(table: Table, **candidates: Sequence[str]) -> Table:
    """The table with another column ``task``, ``worker``, ``label`` ... wherever only one can be meant."""
    columns = dict(table.columns)
    for name, found in candidates.items():
        if len(found) == 1 and found[0] in columns:
            columns[name] = columns[found[0]]
    return Table(columns, table.source, table.place)


def without(table: Table, gone: np.ndarray[Any, Any], why: str) -> Table:
    """The table without these rows, which is said."""
    if not gone.any():
        return table
    warn(f"{table.source}: {int(gone.sum())} of {len(gone)} answers are left out, {why}")
    kept = np.flatnonzero(~gone)
    columns = {
        name: column._replace(codes=column.codes[kept]).by_appearance()
        if isinstance(column, Column)
        else [column[n] for n in kept]
        for name, column in table.columns.items()
    }
    return Table(columns, table.source, lambda n: table.place(int(kept[n])))


def is_one_of(column: Column, words: Sequence[str]) -> np.ndarray[Any, Any]:
    """Which rows have one of these words, in whatever case."""
    hit = np.array([*(str(value).casefold() in words for value in column.values), False], dtype=bool)
    return hit[column.codes]
