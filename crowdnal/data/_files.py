"""Files of annotations: what kind each is, seen from its content, and its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from crowdnal.data._binary import ARROW, NUMPY, PARQUET, magic_of, read_arrow, read_npy
from crowdnal.data._csv import Progress, read_delimited
from crowdnal.data._dense import Matrix, as_matrix_of
from crowdnal.data._json import parse_json
from crowdnal.data._matrix import each_row_once, is_headless, is_matrix, read_matrix_of, share_values
from crowdnal.data._table import Table, brief, nested, records
from crowdnal.data._text import Dialect, Text, read_dialect, read_head, readable
from crowdnal.data.formats import Head, formats, propose


class Reading(NamedTuple):
    """How a file is to be read; see ``Annotations.read``."""

    format: str | None = None
    columns: Sequence[str] | None = None
    separator: str | None = None
    encoding: str | None = None
    progress: Progress | None = None


def read_file(
    path: Path, how: Reading, needed: Sequence[Any], missing: Any, named_rows: bool = False
) -> Table | Matrix:
    """A long table with the needed columns, or a matrix.

    Args:
        path: of the file.
        how: to read it.
        needed: columns of a long table: the task's, the worker's, the label's, others.
        missing: markers, which may stand in a header of numbers.
        named_rows: whether the caller knows the items of a matrix's rows.

    Raises:
        ValueError: naming the file, and the line or the option that is missing.
    """
    if how.format not in (None, "long", "dense"):
        if how.format not in formats():
            raise ValueError(f"format={how.format!r} is unknown: use long, dense{''.join(f', {n}' for n in formats())}")
        given = [name for name in ("columns", "separator", "encoding") if getattr(how, name) is not None]
        if given:
            raise ValueError(f"format={how.format!r} says how the file is written: leave out {given[0]}=")
        with readable(path):
            return formats()[str(how.format)].read(path)
    magic = magic_of(path)
    if magic in (PARQUET, ARROW):
        data = read_arrow(path, magic, needed, how.progress)
        columns = {name: data.column(name) for name in data.column_names}
        return _of_table(Table(columns, str(path), lambda n: f"{path}, row {n}"), how, needed)
    if magic == NUMPY:
        return read_npy(path)
    if magic[:4] == b"PK\x03\x04":
        raise ValueError(
            f"{path} is a spreadsheet or an archive: save it as CSV, unpack it, or give format= if it is an export"
        )
    text = read_head(path, how.encoding)
    if text.head.lstrip("\ufeff \t\r\n")[:1] in ("{", "["):
        with readable(path):
            value, place = _read_json(text)
        if value is not None:
            return _of_json(text, value, place, how, needed)
    return _read_text(text, how, needed, missing, named_rows)


def describe_file(path: Path, how: Reading, needed: Sequence[Any]) -> dict[str, Any]:
    """What is seen of a file before it is read: its kind and, of delimited text, encoding, separator and first row."""
    if how.format not in (None, "long", "dense"):
        return {"kind": f"export of {how.format}"}
    magic = magic_of(path)
    kinds = {PARQUET: "Parquet", ARROW: "Arrow", NUMPY: "matrix of numpy"}
    if magic in kinds:
        return {"kind": kinds[magic]}
    text = read_head(path, how.encoding)
    if text.head.lstrip("\ufeff \t\r\n")[:1] in ("{", "["):
        return {"kind": "JSON"}
    dialect = read_dialect(text, [] if how.columns else needed, how.separator, blanks=True)
    names = {None: "blanks", "": "none, a cell per line", "\t": "tab"}
    return {
        "kind": "delimited text",
        "encoding": text.encoding,
        "separator": names.get(dialect.separator, dialect.separator),
        "first row": dialect.header,
    }


# Parquet, Arrow


def _of_table(table: Table, how: Reading, needed: Sequence[Any]) -> Table | Matrix:
    """A typed table: long if it has the columns, a matrix if that is what it is said to be."""
    names = list(table.columns)
    if how.format == "dense":
        return as_matrix_of(table.source, {name: table.columns[name] for name in names})
    return table


# JSON


def _read_json(text: Text) -> tuple[Any, str]:
    try:
        with text.open() as file:
            return parse_json(file.read(), str(text.path))
    except UnicodeDecodeError:
        raise text.undecodable() from None


def _of_json(text: Text, value: Any, place: str, how: Reading, needed: Sequence[Any]) -> Table | Matrix:
    path = text.path
    recipe = (
        'give records such as {"task": ..., "worker": ..., "label": ...}, one per answer, as a list or one per line, '
        "or {task: {worker: label}}"
    )
    rows = value if isinstance(value, list) else None
    head = Head(path, text.head, (), rows[0] if rows else value)
    if rows and all(isinstance(row, list) for row in rows):
        return as_matrix_of(path, rows)
    if rows and all(isinstance(row, Mapping) for row in rows):
        columns: Any = records(rows)
    elif isinstance(value, Mapping) and value and all(isinstance(column, list) for column in value.values()):
        columns = value
    elif isinstance(value, Mapping) and value and all(isinstance(answers, Mapping) for answers in value.values()):
        proposed = propose(head)
        columns = nested(value)
        if proposed or not _are_answers(columns):
            raise ValueError(f"{path} is JSON, but not of tasks with a label per worker{proposed}; {recipe}")
    else:
        raise ValueError(f"{path} is JSON of another shape{propose(head)}; {recipe}")
    table = Table(columns, str(path), lambda n: f"{path}, {place} {n + 1}")
    absent = [name for name in needed if name not in columns]
    if absent and how.format != "dense":
        raise ValueError(
            f"{path} has no column {absent[0]!r}, only {brief(columns)}{propose(head)}; {table.advice()}; else {recipe}"
        )
    return _of_table(table, how, needed)


def _are_answers(columns: Mapping[str, list[Any]]) -> bool:
    """Whether what stands for workers are not the fields of a record, and what stands for labels are labels."""
    words = ("annot", "text", "label", "answer", "worker", "id")
    if any(word in str(worker).casefold() for worker in set(columns["worker"]) for word in words[:-1]):
        return False
    if any(isinstance(label, (Mapping, list)) for label in columns["label"]):
        return False
    by_worker: dict[Any, set[Any]] = {}
    for worker, label in zip(columns["worker"], columns["label"], strict=True):
        by_worker.setdefault(worker, set()).add(label)
    return share_values(list(by_worker.values()), len(columns["label"]))


# Delimited text


def _read_text(text: Text, how: Reading, needed: Sequence[Any], missing: Any, named_rows: bool) -> Table | Matrix:
    path, wanted = text.path, list(needed)
    names = list(how.columns) if how.columns is not None else None
    dialect = read_dialect(text, wanted if names is None else [], how.separator, blanks=True)
    header = dialect.header
    if how.format == "dense":
        return each_row_once(read_matrix_of(text, dialect, missing, names, how.progress))
    if names is not None:
        if len(names) != len(header):
            raise ValueError(
                f"columns names {len(names)} columns and {path} has {len(header)}: name all, in order, also those that "
                "are not needed"
            )
        long = True
    else:
        names = header
        long = how.format == "long" or any(name in header[1:] for name in wanted[1:3]) or set(wanted) <= set(header)
    table = Table(dict.fromkeys(names), str(path), str)
    if long:
        for name in wanted:
            if name not in names:
                raise ValueError(_no_column(text, dialect, table, name, how.columns is not None))
            if names.count(name) > 1:
                raise ValueError(f"{path} has two columns {name!r}: rename or drop one of them")
        return read_delimited(
            text, dialect, names, wanted, headed=how.columns is None or header == names, progress=how.progress
        )
    headless = is_headless(header)
    proposed = propose(Head(path, text.head, tuple(header)))
    if proposed:
        raise ValueError(f"{path}: columns {brief(header)}{proposed}")
    matrix = None
    if headless or len(header) not in (3, 4):
        matrix = read_matrix_of(text, dialect, missing, None, how.progress)
        if (headless and len(header) in (3, 4) and not named_rows) or not is_matrix(matrix, missing):
            matrix = None
    if matrix is None:
        first = "starts with" if headless else "has columns"
        raise ValueError(
            f"{path} {first} {', '.join(header[:40])}: neither {', '.join(map(str, wanted[:3]))} (one answer per row) "
            f"nor clearly one column of labels per worker; {table.advice()}; or give columns= if the file has no "
            'header, or format="dense" if it is a matrix'
        )
    return each_row_once(matrix)


def _no_column(text: Text, dialect: Dialect, table: Table, name: Any, named: bool) -> str:
    message = f"{text.path} has no column {name!r}, only {brief(table.columns)}"
    if named:
        return f"{message}; {table.advice()}"
    message += propose(Head(text.path, text.head, tuple(dialect.header)))
    return f"{message}; {table.advice()}; or give columns= (such as columns=worker,task,label) if it has no header"
