"""The readers behind ``Annotations``: what is given, in memory or as a file, to answers and fields."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from crowdnal.data._answers import Answers
from crowdnal.data._dense import Matrix, as_matrix, read_dense, read_matrix
from crowdnal.data._fields import Fields
from crowdnal.data._files import Reading, read_file
from crowdnal.data._labels import one_or_several
from crowdnal.data._long import Long, read_long
from crowdnal.data._soft import is_soft, soft_fields
from crowdnal.data._table import Table, as_table
from crowdnal.data._vocabulary import Ids


def long_fields(data: Any, want: Long, items: Ids, annotators: Ids, format: str = "long") -> Fields:
    """See ``Annotations.from_long``."""
    if isinstance(data, (str, os.PathLike)):
        return file_fields(data, Reading(format), want, items, annotators)
    return read_long(as_table(data), want).fields(items, annotators, want.classes)


def dense_fields(data: Any, num_classes: int | None, missing: Any, items: Ids, annotators: Ids, classes: Ids) -> Fields:
    """See ``Annotations.from_dense``."""
    if isinstance(data, (str, os.PathLike)):
        data = read_file(Path(data), Reading("dense"), (), missing)
    if is_soft(data):
        return soft_fields(data, num_classes, missing, items, annotators, classes)
    matrix = data if isinstance(data, Matrix) else as_matrix(data)
    return read_dense(matrix, num_classes, missing, items, annotators, classes)


def file_fields(path: Any, how: Reading, want: Long, items: Ids, annotators: Ids) -> Fields:
    """See ``Annotations.read``."""
    found = read_file(Path(path), how, want.columns, want.missing, items is not None)
    if isinstance(found, Table):
        return _of_table(found, how, want).fields(items, annotators, want.classes)
    unsure = one_or_several(want.unsure, "unsure")
    return read_dense(found, None, want.missing, items, annotators, want.classes, unsure)


def read_answers(path: str | os.PathLike[str], how: Reading, want: Long, items: Ids = None) -> Answers:
    """The answers in a file, before they are tied to items.

    Args:
        path: of the file.
        how: to read it.
        want: what the columns of a long table are called, and what labels mean.
        items: ids of the rows of a matrix without a header.

    Raises:
        ValueError: naming the file, the line and the fix.
    """
    found = read_file(Path(path), how, want.columns, want.missing, items is not None)
    if isinstance(found, Table):
        return _of_table(found, how, want)
    if found.items is None and items is None:
        raise ValueError(
            f"{path} is a matrix without header, so nothing says which item a row belongs to: give items=, an id per "
            "row, in order"
        )
    rows = None if found.items is not None else items
    return read_matrix(found, want.missing, want.classes, rows, unsure=one_or_several(want.unsure, "unsure"))


def _of_table(table: Table, how: Reading, want: Long) -> Answers:
    if how.format not in (None, "long"):  # an export, whose reader knows where weights and times are
        weight = "weight" if want.weight is None and "weight" in table.columns else want.weight
        last = "time" if want.last is True and "time" in table.columns else want.last
        want = want._replace(weight=weight, last=last)
    return read_long(table, want)
