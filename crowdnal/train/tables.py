"""Reading annotation and label files of the kinds that exist in the wild, with the line number of every row kept."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from crowdnal.train.config import InputError

Rows = list[tuple[int, list[str]]]
MISSING = frozenset({"", "nan", "NaN", "NA", "<NA>"})


@dataclass(frozen=True)
class LongTable:
    """One annotation a row. ``label`` is None where the cell was empty: its task and worker still count."""

    path: Path
    task: list[str]
    worker: list[str]
    label: list[str | None]
    line: list[int]
    workers: list[str] | None = None

    def where(self, row: int) -> str:
        """The row in words, for messages."""
        return f"{self.path}, line {self.line[row]}"


@dataclass(frozen=True)
class LabelTable:
    """One item a row with its true label."""

    path: Path
    task: list[str]
    label: list[str]
    line: list[int]

    def where(self, row: int) -> str:
        """The row in words, for messages."""
        return f"{self.path}, line {self.line[row]}"


def read_annotations(
    path: Path, form: str, columns: tuple[str, str, str], missing: str | None, items: Path | None
) -> LongTable:
    """Read a long or dense file of annotations.

    Args:
        path: of the file.
        form: ``"long"``, ``"dense"`` or ``"auto"``: long if the header has the three columns, dense if there is no
            header or its other columns could be workers.
        columns: names of the task, worker and label columns of a long file.
        missing: marker of "no label"; by default -1 in a dense file and none in a long one. Empty cells always are.
        items: file with a name a line for the rows of a dense file without header.

    Raises:
        InputError: naming the line and the fix.
    """
    lines = _rows(path, whitespace=True)
    if not lines:
        raise InputError(f"{path} is empty: it must hold annotations")
    header = lines[0][1]
    numeric = all(_is_number(cell) or cell in MISSING - {""} for cell in header)
    has_columns = all(column in header for column in columns)
    if form == "auto":
        form = "long" if has_columns else "dense"
        if form == "dense" and not numeric and len(header) in (3, 4):
            raise InputError(
                f"{path}: columns {', '.join(header)} are neither {', '.join(columns)} (one annotation a row) nor "
                "clearly one column a worker: name yours with --task-column, --worker-column and --label-column, or "
                "give --format dense"
            )
    if form == "long":
        if not has_columns:
            absent = [column for column in columns if column not in header]
            raise InputError(
                f"{path} has no column {absent[0]!r}, it has {', '.join(header)}: name yours with --task-column, "
                "--worker-column and --label-column"
            )
        return _long(path, lines, header, columns, missing)
    return _dense(path, lines, None if numeric else header, "-1" if missing is None else missing, items)


def _long(path: Path, lines: Rows, header: list[str], columns: tuple[str, str, str], missing: str | None) -> LongTable:
    task_at, worker_at, label_at = (header.index(column) for column in columns)
    table = LongTable(path, [], [], [], [])
    for number, cells in lines[1:]:
        for column, at in zip(columns[:2], (task_at, worker_at), strict=True):
            if not cells[at]:
                raise InputError(f"{path}, line {number}: column {column!r} is empty: fill it in or drop the row")
        label = cells[label_at]
        table.task.append(cells[task_at])
        table.worker.append(cells[worker_at])
        table.label.append(None if label in MISSING or label == missing else _integer(label))
        table.line.append(number)
    return table


def _dense(path: Path, lines: Rows, header: list[str] | None, missing: str, items: Path | None) -> LongTable:
    if header is None:
        if items is None:
            raise InputError(
                f"{path} is a matrix without header, so nothing says which image a row belongs to: give --items FILE "
                "with one file name a line, in the order of the rows"
            )
        names = _names(items)
        if len(names) != len(lines):
            raise InputError(f"--items {items} has {len(names)} names for {len(lines)} rows of {path}: give one a row")
        workers = [str(r) for r in range(len(lines[0][1]))]
        body = [(number, name, cells) for (number, cells), name in zip(lines, names, strict=True)]
    else:
        workers = header[1:]
        wrong = next((w for i, w in enumerate(workers) if w in workers[:i] or _same(w, missing) or w in MISSING), None)
        if wrong is not None:
            what = "occurs twice" if workers.count(wrong) > 1 else "is no name of a worker"
            raise InputError(
                f"{path}, line {lines[0][0]}: column {wrong!r} {what}: the first line must name the tasks' column and "
                "then each worker once"
            )
        body = [(number, cells[0], cells[1:]) for number, cells in lines[1:]]
    table = LongTable(path, [], [], [], [], workers)
    for number, task, cells in body:
        for worker, label in zip(workers, cells, strict=True):
            given = None if label in MISSING or _same(label, missing) else label
            # the first cell keeps a task without any label
            if given is not None or worker is workers[0]:
                table.task.append(task)
                table.worker.append(worker)
                table.label.append(_integer(given))
                table.line.append(number)
    return table


def read_labels(path: Path, items: Path | None, columns: tuple[str, str], argument: str) -> LabelTable:
    """Read true labels: a CSV file with a task and a label column, or a label a line with the tasks in ``items``."""
    lines = _rows(path, whitespace=False)
    if not lines:
        raise InputError(f"{argument} {path} is empty: it must hold labels")
    header = lines[0][1]
    if len(header) == 1:
        if items is None:
            raise InputError(
                f"{argument} {path} has one label a line, so nothing says which image it belongs to: give --"
                f"{'test-items' if argument.startswith('--test') else 'items'} FILE with one file name a line, or a "
                "CSV file with columns task and label"
            )
        names = _names(items)
        if len(names) != len(lines):
            raise InputError(f"{items} has {len(names)} names for {len(lines)} labels of {path}: give one a label")
        return LabelTable(path, names, [str(_integer(cells[0])) for _, cells in lines], [number for number, _ in lines])
    at = [header.index(column) for column in columns if column in header]
    if len(at) != 2:
        if len(header) != 2 or _is_number(header[1]):
            raise InputError(
                f"{argument} {path} starts with {', '.join(header)}: it must have a header with columns "
                f"{columns[0]!r} and {columns[1]!r} (or other names with --task-column and --label-column)"
            )
        at = [0, 1]
    rows = [(number, cells) for number, cells in lines[1:] if cells[at[1]] not in MISSING]
    labels = [str(_integer(cells[at[1]])) for _, cells in rows]
    return LabelTable(path, [cells[at[0]] for _, cells in rows], labels, [number for number, _ in rows])


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which worker 10 comes after worker 9."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part)


def class_names(labels: Iterable[str | None]) -> list[str]:
    """The distinct labels: by number where all are numbers, else in natural order."""
    return sorted({label for label in labels if label is not None}, key=natural_number)


def natural_number(name: str) -> tuple[float, tuple[tuple[int, int, str], ...]]:
    """Sort key of labels: negative and fractional numbers by value, then names."""
    return (float(name), ()) if _is_number(name) else (float("inf"), natural(name))


def code_labels(
    labels: Sequence[str | None], classes: Sequence[str], where: Sequence[int] | None, path: Path
) -> list[int]:
    """Class index of each label, -1 for None. Integers are indices where ``classes`` are names.

    Raises:
        InputError: for a label that is no class, naming the line.
    """
    index = {name: code for code, name in enumerate(classes)}
    if not any(_is_number(name) for name in classes):
        index.update((str(code), code) for code in range(len(classes)))
    codes = []
    for row, label in enumerate(labels):
        if label is not None and label not in index:
            line = f", line {where[row]}" if where is not None else ""
            raise InputError(
                f"{path}{line}: label {label!r} is not among the {len(classes)} classes "
                f"({', '.join(list(classes)[:12])}{', ...' if len(classes) > 12 else ''}): give all of them with "
                "--classes, in order"
            )
        codes.append(-1 if label is None else index[label])
    return codes


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a text file in UTF-8 ({error.reason} at byte {error.start})") from None


def _names(path: Path) -> list[str]:
    return [line.strip() for line in _text(path).splitlines() if line.strip()]


def _rows(path: Path, *, whitespace: bool) -> Rows:
    """Line number and cells of each row that is not empty: separated by the comma, tab or semicolon of line one."""
    text = _text(path)
    first = next((line for line in text.splitlines() if line.strip()), "")
    separator = next((mark for mark in (",", "\t", ";") if mark in first), None)
    rows: Rows = []
    if separator is None:
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                rows.append((number, line.split() if whitespace else [line.strip()]))
    else:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)
        for cells in reader:
            if any(cell.strip() for cell in cells):
                rows.append((reader.line_num, [cell.strip() for cell in cells]))
    for number, cells in rows:
        if len(cells) != len(rows[0][1]):
            raise InputError(
                f"{path}, line {number}: {len(cells)} columns where line {rows[0][0]} has {len(rows[0][1])}"
            )
    return rows


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return cell not in MISSING


def _integer(cell: str | None) -> str | None:
    """A label as it is compared: `3.0` is `3`, since matrices are often written as floats."""
    if cell is None or not _is_number(cell) or not float(cell).is_integer():
        return cell
    return str(int(float(cell)))


def _same(cell: str, marker: str) -> bool:
    return cell == marker or (_is_number(cell) and _is_number(marker) and float(cell) == float(marker))
