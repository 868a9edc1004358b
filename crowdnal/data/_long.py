"""Long tables, one answer (or the answers of one worker to one task) per row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from crowdnal._utils.extras import require
from crowdnal._utils.warn import warn
from crowdnal.data._answers import Answers
from crowdnal.data._columns import Column, read_column, read_numbers
from crowdnal.data._labels import USUAL, drop_missing, no_labels, numbers, one_or_several
from crowdnal.data._lists import one_per_row
from crowdnal.data._table import Table, as_ids
from crowdnal.data._vocabulary import Array, Ids, distinct, is_number


class Long(NamedTuple):
    """What the columns of a long table are called and mean; see ``Annotations.from_long``."""

    task: Any = "task"
    worker: Any = "worker"
    label: Any = "label"
    weight: Any = None
    probabilities: Sequence[Any] | None = None
    last: Any = False
    unsure: Any = ()
    missing: Any = USUAL
    classes: Ids = None
    sets: bool = False  # whether labels are sets of tags, as written

    @property
    def choices(self) -> dict[Any, float]:
        """The columns of labels, and what a label in each counts."""
        if self.probabilities is not None:
            return {}
        return dict(self.label) if isinstance(self.label, Mapping) else {self.label: 1.0}

    @property
    def shares(self) -> list[Any]:
        """The columns of numbers."""
        return [*([] if self.weight is None else [self.weight]), *(self.probabilities or ())]

    @property
    def columns(self) -> list[Any]:
        """The names of all columns that are needed."""
        time = [] if isinstance(self.last, bool) else [self.last]
        return list(dict.fromkeys([self.task, self.worker, *self.choices, *time, *self.shares]))


class _Reading(NamedTuple):
    """A long table while it is read: its columns, numbered, and those of numbers."""

    table: Table
    want: Long
    columns: dict[Any, Column]
    shares: dict[Any, Array]
    missing: dict[str, int]

    def place(self, name: Any, n: int) -> str:
        """The cell of a column in row n."""
        file = self.table.written
        at = f"{self.table.place(n)}, column {name!r}" if file else f"column {name!r} of {self.table.place(n)}"
        ids = [self.columns.get(column) for column in (self.want.task, self.want.worker)]
        if any(column is None or n >= len(column.codes) for column in ids):
            return at
        task, worker = (c.values[c.codes[n]] if c.codes[n] >= 0 else None for c in ids if c is not None)
        return f"{at} (task {task!r}, worker {worker!r})"


def read_long(table: Table, want: Long) -> Answers:
    """The answers of a long table.

    Raises:
        ValueError: naming the column, or the row and the fix.
    """
    for option in ("task", "worker", "label", "weight"):
        name = getattr(want, option)
        if not isinstance(name, Hashable) and not (option == "label" and isinstance(name, Mapping)):
            raise ValueError(f"{option}={name!r} must be the name of a column")
    table = one_per_row(table, want.worker, want.columns)
    reading = _Reading(table, want, {}, {}, {})
    for name in want.columns:
        raw, place = table.column(name), partial(reading.place, name)
        if name in want.shares:
            reading.shares[name] = read_numbers(raw, f"column {name!r}")
        else:
            if want.sets and name in want.choices and not isinstance(raw, Column):
                rows = raw.to_pylist() if hasattr(raw, "to_pylist") else raw
                raw = [_as_set(value, partial(place, n)) for n, value in enumerate(rows)]
            column = raw if isinstance(raw, Column) else read_column(raw, f"column {name!r}", place)
            reading.columns[name] = as_ids(column) if table.written and column is not raw else column
            if table.written and isinstance(table.columns, dict):
                table.columns[name] = reading.columns[name]  # what was read from the file is needed no more
        del raw
    lengths = {name: len(values) for name, values in reading.shares.items()}
    lengths |= {name: len(column.codes) for name, column in reading.columns.items()}
    task, worker = reading.columns[want.task], reading.columns[want.worker]
    for name, length in lengths.items():
        if length != len(task.codes):
            raise ValueError(
                f"column {name!r} has {length} rows and {want.task!r} has {len(task.codes)}; they must be as long"
            )
    for name in (want.task, want.worker):
        if (reading.columns[name].codes < 0).any():
            n = int((reading.columns[name].codes < 0).argmax())
            raise ValueError(f"{reading.place(name, n)} is missing, and only labels may be: fill it in or drop the row")
    _warn_of_lists(reading)
    label, row, share = _choices(reading) if want.probabilities is None else _probabilities(reading)
    if want.weight is not None:
        weight = _checked(
            reading, want.weight, row, "weights are finite numbers and not negative, 0 ignores an annotation"
        )
        share = weight if share is None else share * weight
    if want.last is not False:
        kept = _last_of_each(reading, row)
        label, row, share = label._replace(codes=label.codes[kept]), row[kept], None if share is None else share[kept]
    tasks = task.by_appearance()._replace(declared=True)
    whole = {"task": tasks, "worker": worker}
    names = {"task": want.task, "worker": want.worker, "label": next(iter(want.choices), None)}
    if share is not None or len(row) < len(task.codes):
        tasks, worker = tasks._replace(codes=tasks.codes[row]), worker._replace(codes=worker.codes[row])
    else:
        row = range(len(row))  # type: ignore[assignment]  # every row, in 80 bytes
    return Answers(
        tasks,
        worker,
        label,
        lambda what, n: reading.place(names[what], int(row[n])),
        table.written,
        share,
        one_or_several(want.unsure, "unsure"),
        reading.missing,
        lambda what, u: reading.place(names[what], int((whole[what].codes == u).argmax())),
    )


def _warn_of_lists(reading: _Reading) -> None:
    """Several annotators side by side in a cell, their labels in another, are read as one annotator."""
    worker, label = (
        reading.columns.get(name) for name in (reading.want.worker, next(iter(reading.want.choices), None))
    )
    if worker is None or label is None or reading.want.sets:
        return
    pairs = list(zip(worker.codes[:100].tolist(), label.codes[:100].tolist(), strict=True))
    cells = [(worker.values[w], label.values[y]) for w, y in pairs if w >= 0 and y >= 0]
    texts = [(a, b) for a, b in cells if isinstance(a, str) and isinstance(b, str)]
    commas = [a.count(",") for a, b in texts if a.count(",") == b.count(",")]
    if len(commas) == len(texts) and 2 * sum(map(bool, commas)) > len(texts):
        a, b = next(pair for pair in texts if "," in pair[0])
        warn(f"worker {a!r} with label {b!r} is read as one annotator: give a row per answer if there are several")


def _as_set(value: Any, place: Callable[[], str]) -> Any:
    """A collection of tags as something that can be compared."""
    try:
        return frozenset(value) if isinstance(value, (list, tuple, set, frozenset, np.ndarray)) else value
    except TypeError:
        raise ValueError(f"{place()} is {value!r}, which is no set of tags: tags must be hashable") from None


def _checked(reading: _Reading, name: Any, row: Array, rule: str, most: float = np.inf) -> Array:
    """The numbers of a column in these rows."""
    values = reading.shares[name][row]
    bad = ~(np.isfinite(values) & (values >= 0) & (values <= most))
    if bad.any():
        n = int(row[bad.argmax()])
        raw = reading.table.column(name)
        if isinstance(raw, Column):
            found = raw.values[raw.codes[n]] if raw.codes[n] >= 0 else None
        else:
            found = raw.iloc[n] if hasattr(raw, "iloc") else raw[n]
        raise ValueError(f"{reading.place(name, n)} is {getattr(found, 'item', lambda: found)()!r}; {rule}")
    return values


def _choices(reading: _Reading) -> tuple[Column, Array, Array | None]:
    """The labels, the row of each, and what it counts (None: 1)."""
    want, written = reading.want, reading.table.written
    counts = list(want.choices.values())
    if not counts or any(not is_number(count) or not 0 <= count < float("inf") for count in counts):
        raise ValueError(f"label={want.label!r} must give for each column what a label in it counts, 0 or more")
    label = _below_each_other([reading.columns[name] for name in want.choices])
    if written and not want.sets and any(isinstance(value, frozenset) for value in label.values):
        u = next(u for u, value in enumerate(label.values) if isinstance(value, frozenset))
        n = int((label.codes == u).argmax()) % max(len(reading.columns[want.task].codes), 1)
        raise ValueError(
            f"{reading.place(next(iter(want.choices)), n)} has several labels, {', '.join(sorted(label.values[u]))}: "
            "crowdnal.multilabel.from_label_sets reads sets of tags"
        )
    apart = one_or_several(want.unsure, "unsure")
    cells, label = (
        label,
        drop_missing(label, want.missing, written=written, dense=False, classes=want.classes, apart=apart),
    )
    reading.missing.update(no_labels(cells, label))
    if written and not want.sets:
        label = numbers(label, apart)
    row = np.flatnonzero(label.codes >= 0)
    if counts == [1.0]:
        return label if len(row) == len(label.codes) else label._replace(codes=label.codes[row]), row, None
    size = max(len(label.codes) // len(counts), 1)
    row = row[np.argsort(row % size, kind="stable")]  # the choices of one row side by side
    return label._replace(codes=label.codes[row]), row % size, np.array(counts, dtype=np.float64)[row // size]


def _below_each_other(columns: Sequence[Column]) -> Column:
    if len(columns) == 1:
        return columns[0]
    values: list[Any] = []
    codes = []
    for column in columns:
        codes.append(np.where(column.codes < 0, -1, column.codes + len(values)))
        values += column.values
    return Column(np.concatenate(codes), values, columns[0].declared).mapped(lambda value: value)


def _probabilities(reading: _Reading) -> tuple[Column, Array, Array]:
    """A column per class: every class whose probability is above 0 is a label that counts as much."""
    names = list(reading.want.probabilities or ())
    classes = names if reading.want.classes is None else list(distinct(reading.want.classes, "classes"))
    if len(names) != len(classes) or not names:
        raise ValueError(f"probabilities names {len(names)} columns for {len(classes)} classes; give one for each")
    answered = np.flatnonzero(~np.isnan(np.stack([reading.shares[name] for name in names])).all(0))
    rule = "probabilities are numbers from 0 to 1, all empty where there is no answer"
    shares = np.stack([_checked(reading, name, answered, rule, 1.0) for name in names], 1)
    at, code = np.nonzero(shares)
    return Column(code.astype(np.int64), classes, declared=True), answered[at], shares[at, code]


def _last_of_each(reading: _Reading, row: Array) -> Array:
    """Of several rows of a worker and a task, those answers that stand in the latest one."""
    want = reading.want
    time = row if want.last is True else _ranks(reading, want.last)[row]
    pair = reading.columns[want.task].codes * len(reading.columns[want.worker].values)
    pair = (pair + reading.columns[want.worker].codes)[row]
    order = np.lexsort((row, time, pair))
    ends = np.append(pair[order][1:] != pair[order][:-1], np.ones(len(order[:1]), dtype=bool))
    latest = np.empty(len(row), dtype=np.int64)
    latest[order] = row[order[ends]][np.cumsum(ends) - ends]
    return np.flatnonzero(latest == row)


def _ranks(reading: _Reading, name: Any) -> Array:
    """Numbers, or dates in any usual form, as integers in their order."""
    column = reading.columns[name]
    if (column.codes < 0).any():
        n = int((column.codes < 0).argmax())
        raise ValueError(f"{reading.place(name, n)} is missing: last= needs the time of every answer")
    times = numbers(column).values
    if len(times) < len(column.values) or not all(map(is_number, times)):
        pandas = require("pandas", extra="train")
        dates = pandas.to_datetime(
            pandas.Series(column.values, dtype=object), utc=True, format="mixed", errors="coerce"
        )
        if dates.isna().any():
            u = int(dates.isna().to_numpy().argmax())
            n = int((column.codes == u).argmax())
            raise ValueError(
                f"{reading.place(name, n)} is {column.values[u]!r}, which is no time: give ISO 8601, or numbers"
            )
        times = dates.tolist()
    place = {time: rank for rank, time in enumerate(sorted(set(times)))}
    return np.array([place[time] for time in times], dtype=np.int64)[column.codes]
