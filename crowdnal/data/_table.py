"""A table: columns by name, and where each of its rows stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crowdnal.data._columns import Column, column_names

# What other tools call the three columns; only ever proposed, never taken.
_ALSO = {
    "task": ("task", "item", "image", "filename", "file", "question", "unit", "example", "document"),
    "worker": ("worker", "annotator", "user", "rater", "coder", "labeler", "turker", "judge", "source"),
    "label": ("label", "answer", "annotation", "response", "category", "class", "rating", "judgment"),
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Columns of any library by name.

    Attributes:
        columns: a mapping of columns: lists, arrays, Series, or :class:`Column` where they are numbered already.
        source: what it is called in messages.
        place: row n in words, such as "answers.csv, line 7".
        written: whether it stands in a file: ids are text then, and words such as NA are no labels.
    """

    columns: Mapping[Any, Any]
    source: str
    place: Callable[[int], str]
    written: bool = True

    def column(self, name: Any) -> Any:
        """One column.

        Raises:
            ValueError: there is none, or there are two, of that name.
        """
        names = list(self.columns)
        if name not in names:
            raise ValueError(f"{self.source} has no column {name!r}, only {brief(names)}; {self.advice()}")
        return self.columns[name]

    def advice(self) -> str:
        """Which options name the columns, and what they might be."""
        found = {
            option: name
            for option, words in _ALSO.items()
            for word in reversed(words)
            for name in self.columns
            if isinstance(name, str) and word in name.lower()
        }
        hint = f" (perhaps {', '.join(f'{option}={name!r}' for option, name in found.items())})" if found else ""
        return f"name yours with task=, worker=, label=, weight={hint}"


def brief(names: Iterable[Any]) -> str:
    """The first names of a long list."""
    names = list(names)
    return str(names) if len(names) <= 40 else f"{names[:20]} and {len(names) - 20} more"


def as_table(data: Any) -> Table:
    """A table in memory: a DataFrame, a mapping of columns, item -> annotator -> label, a structured array, records.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(data, Mapping) and data and all(isinstance(value, Mapping) for value in data.values()):
        return Table(nested(data), "data", "row {}".format, written=False)
    if isinstance(data, Sequence) and data and all(isinstance(row, Mapping) for row in data):
        return Table(records(data), "data", "row {}".format, written=False)
    names = column_names(data)
    if names is None:
        raise ValueError(
            "data must be a DataFrame, the path of a file, a mapping of columns or of tasks to {worker: label}, or a "
            f"list of records, got {type(data).__name__}"
        )
    twice = {name for name in names if names.count(name) > 1} if len(names) < 1000 else set()
    if twice:
        raise ValueError(f"data has two columns {min(twice, key=str)!r}; rename or drop one of them")
    return Table(_Columns(data, names), "data", "row {}".format, written=False)


class _Columns(Mapping[Any, Any]):
    """The columns of an object that gives them by ``data[name]``."""

    def __init__(self, data: Any, names: list[Any]) -> None:
        self.data, self.names = data, names

    def __getitem__(self, name: Any) -> Any:
        return self.data[name]

    def __iter__(self) -> Any:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def nested(data: Mapping[Any, Mapping[Any, Any]]) -> dict[str, list[Any]]:
    """Item -> annotator -> label, one of them or a list, as columns."""
    rows = [
        (task, worker, label)
        for task, answers in data.items()
        for worker, given in answers.items()
        for label in (given if isinstance(given, list) else [given])
    ]
    return {name: [row[c] for row in rows] for c, name in enumerate(("task", "worker", "label"))}


def records(rows: Sequence[Mapping[Any, Any]]) -> dict[Any, list[Any]]:
    """One mapping per row as columns; what a row does not have is None."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def as_ids(column: Column) -> Column:
    """Ids of a file: kept as written, without blanks around them; empty is missing."""
    if set(map(type, column.values)) == {str} and "" not in column.values:
        text = "".join(column.values)
        if text.split(None, 1) == [text]:  # no blank anywhere
            return column
    stripped = [value.strip() if isinstance(value, str) else value for value in column.values]
    if stripped == column.values and "" not in stripped:
        return column
    return column.mapped(lambda value: (value.strip() or None) if isinstance(value, str) else value)
