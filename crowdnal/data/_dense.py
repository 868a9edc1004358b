"""Matrices of labels, one item per row, one annotator per column."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from crowdnal.data._answers import Answers
from crowdnal.data._columns import Column, column_names, read_column
from crowdnal.data._fields import Fields
from crowdnal.data._labels import USUAL, drop_missing, encode, markers, no_labels, numbers
from crowdnal.data._vocabulary import Ids, Vocabulary, distinct, is_number

_MOST_CLASSES = 2**24
"""Each gets an id."""


class Matrix(NamedTuple):
    """A matrix ``[N, R]`` as a tensor of numbers or as a column of all cells, row by row, and the ids it comes with."""

    shape: tuple[int, int]
    table: Tensor | None
    cells: Column | None
    items: list[Any] | None = None
    annotators: list[Any] | None = None
    where: Callable[[int], str] | None = None  # row i of a file in words

    def place(self, i: int, r: int) -> str:
        """A cell in words."""
        named = [] if self.items is None else [f"item {self.items[i]!r}"]
        named += [] if self.annotators is None else [f"annotator {self.annotators[r]!r}"]
        at = f"row {i}, column {r} of matrix" if self.where is None else self.where(i)
        return at + (f" ({', '.join(named)})" if named else "")


def as_matrix(matrix: Any) -> Matrix:
    """A matrix in memory: tensor, array, nested lists, DataFrame or mapping of columns.

    Raises:
        ValueError: for anything else, naming what is wrong.
    """
    if getattr(matrix, "layout", torch.strided) is not torch.strided or hasattr(matrix, "tocoo"):
        raise ValueError("matrix is sparse, and what it does not store could be class 0 or no label: use from_long")
    if (names := column_names(matrix)) is not None:
        return _of_columns(matrix, names)
    table = matrix if isinstance(matrix, (Tensor, np.ndarray)) else _of_rows(matrix)
    return _of_array(table)


def as_matrix_of(source: Any, matrix: Any) -> Matrix:
    """What a file holds: its errors name the file."""
    try:
        return as_matrix(matrix)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _of_array(table: Any) -> Matrix:
    if table.ndim != 2:
        raise ValueError(f"matrix must be [N, R], one row per item, got shape {list(table.shape)}")
    shape = int(table.shape[0]), int(table.shape[1])
    if isinstance(table, Tensor):
        if table.is_complex() or table.is_meta:
            raise ValueError(f"matrix must hold labels, got {table.dtype} on {table.device}")
        return Matrix(shape, table.detach().to(torch.float64 if table.is_floating_point() else torch.int64), None)
    if table.dtype.kind in "iuf" and not isinstance(table, np.ma.MaskedArray):
        kind = np.float64 if table.dtype.kind == "f" else np.int64
        return Matrix(shape, torch.from_numpy(np.require(table, kind, ["C", "W"])), None)

    def place(n: int) -> str:
        return "row {}, column {} of matrix".format(*divmod(n, shape[1]))

    return Matrix(shape, None, read_column(table.ravel(), "matrix", place))


def _of_rows(rows: Any) -> Any:
    if isinstance(rows, (str, bytes, Mapping)) or not hasattr(rows, "__iter__"):
        raise ValueError(f"matrix must be [N, R], one row per item, got {type(rows).__name__}")
    listed = []
    for i, row in enumerate(rows):
        if isinstance(row, (str, bytes, Mapping)) or not hasattr(row, "__iter__"):
            raise ValueError(f"row {i} of matrix is {row!r}; give a list of labels, one per annotator")
        listed.append(list(row))
        if len(listed[i]) != len(listed[0]):
            raise ValueError(
                f"row {i} of matrix has {len(listed[i])} labels and row 0 has {len(listed[0])}; mark what is missing"
            )
    flat = np.empty(len(listed) * (len(listed[0]) if listed else 0), dtype=object)
    for n, value in enumerate(value for row in listed for value in row):
        flat[n] = value
    return flat.reshape(len(listed), -1 if len(flat) else 0)


def _of_columns(frame: Any, names: list[Any]) -> Matrix:
    annotators = list(distinct(names, "column ids of matrix"))
    items = None
    if hasattr(frame, "index") and not isinstance(frame, Sequence):
        items = list(distinct(frame.index.tolist(), "row ids of matrix"))
        kinds = {getattr(kind, "kind", "") if isinstance(kind, np.dtype) else "" for kind in frame.dtypes}
        if kinds and (kinds <= {"i"} or kinds == {"f"}):
            return _of_array(frame.to_numpy())._replace(items=items, annotators=annotators)
    columns = [
        read_column(frame[name], f"column {name!r} of matrix", f"row {{}}, column {name!r} of matrix".format)
        for name in names
    ]
    return of_columns(columns, items, annotators)


def of_columns(columns: list[Column], items: list[Any] | None, annotators: list[Any], where: Any = None) -> Matrix:
    """A matrix of one column of labels per annotator."""
    sizes = {len(column.codes) for column in columns} or {0 if items is None else len(items)}
    if len(sizes) > 1:
        raise ValueError(f"the columns of matrix have {min(sizes)} to {max(sizes)} rows; they must be as long")
    values: list[Any] = []
    codes = np.empty((sizes.pop(), len(columns)), dtype=np.int64)
    for r, column in enumerate(columns):
        codes[:, r] = np.where(column.codes < 0, -1, column.codes + len(values))
        values += column.values
    declared = any(column.declared for column in columns)
    cells = Column(codes.ravel(), values, declared).mapped(lambda value: value)
    return Matrix((codes.shape[0], codes.shape[1]), None, cells, items, annotators, where)


def read_dense(
    matrix: Matrix,
    num_classes: int | None,
    missing: Any,
    items: Ids,
    annotators: Ids,
    classes: Ids,
    unsure: tuple[Hashable, ...] = (),
) -> Fields:
    """See ``Annotations.from_dense``."""
    if num_classes is None:
        answers = read_matrix(matrix, missing, classes, items, annotators, unsure)
    else:
        if classes is not None:
            raise ValueError("give num_classes (the labels are 0 to num_classes-1) or classes, not both")
        if not isinstance(num_classes, (int, np.integer)) or isinstance(num_classes, bool) or num_classes < 0:
            raise ValueError(f"num_classes must be an integer, 0 or more; got {num_classes!r}")
        if num_classes > _MOST_CLASSES:
            raise ValueError(f"num_classes={num_classes} is more than {_MOST_CLASSES}, for which there can be names")
        missing = -1 if missing is USUAL else missing  # it can be no class
        if matrix.table is not None:
            return _numbered(matrix, matrix.table, int(num_classes), missing, items, annotators)
        answers = read_matrix(matrix, missing, None, items, annotators)
        _check_integers(answers, num_classes)
    fields = answers.fields(
        items if matrix.items is not None else None,
        annotators if matrix.annotators is not None else None,
        range(num_classes) if num_classes is not None else classes,
    )
    unnamed = num_classes is not None and all(
        ids is None for ids in (matrix.items, matrix.annotators, items, annotators)
    )
    if matrix.items is None and items is None:  # these may be the rows of a batch: nobody said which items they are
        fields = fields._replace(item_id=None)
    return fields._replace(vocabulary=None) if unnamed else fields


def ids_of(found: list[Any] | None, wanted: Ids, size: int, name: str) -> list[Any]:
    """The ids that a matrix comes with, else those given for it, else numbers."""
    if found is not None or wanted is None:
        return list(range(size)) if found is None else found
    given = distinct(wanted, name)
    if len(given) != size:
        axis = "row" if name == "items" else "column"
        raise ValueError(f"{name} has {len(given)} ids for {size} {axis}s of matrix; give one per {axis}")
    return list(given)


def read_matrix(
    matrix: Matrix,
    missing: Any,
    classes: Ids,
    items: Ids = None,
    annotators: Ids = None,
    unsure: tuple[Hashable, ...] = (),
) -> Answers:
    """The labels of a matrix, its rows and columns as tasks and workers, named here where they have no names."""
    written, (num_rows, num_columns) = matrix.where is not None, matrix.shape
    label = matrix.cells
    if label is None:
        assert matrix.table is not None
        label = read_column(matrix.table.flatten())
    cells, label = label, drop_missing(label, missing, written=written, dense=True, classes=classes, apart=unsure)
    if written:
        label = numbers(label, unsure)
    cell = np.flatnonzero(label.codes >= 0)

    def place(what: str, n: int) -> str:
        i, r = divmod(int(cell[n]), num_columns)
        row = f"row {i} of matrix" if matrix.where is None else matrix.where(i)
        return {"task": row, "worker": f"column {r} of matrix"}.get(what) or matrix.place(i, r)

    return Answers(
        Column(cell // max(num_columns, 1), ids_of(matrix.items, items, num_rows, "items"), declared=True),
        Column(
            cell % max(num_columns, 1), ids_of(matrix.annotators, annotators, num_columns, "annotators"), declared=True
        ),
        label._replace(codes=label.codes[cell]),
        place,
        written,
        unsure=unsure,
        missing=no_labels(cells, label),
        first=lambda what, u: (matrix.where or "row {} of matrix".format)(u) if what == "task" else f"column {u}",
    )


def _check_integers(answers: Answers, num_classes: int) -> None:
    values = answers.label.values
    for u, value in enumerate(values):
        known = is_number(value) or isinstance(value, bool)
        if known and value in range(num_classes):
            continue
        n = int((answers.label.codes == u).argmax())
        if not known:
            raise ValueError(
                f"{answers.place('label', n)} is {value!r}, and num_classes={num_classes} asks for integers; name the "
                "labels with classes= instead, or what is missing with missing="
            )
        present = torch.tensor([float(v) for v in values if is_number(v)])
        raise ValueError(
            f"{answers.place('label', n)} is {value}, outside the labels 0 to {num_classes - 1}; "
            f"{_hint(present, num_classes)}"
        )


def _numbered(matrix: Matrix, table: Tensor, num_classes: int, missing: Any, items: Ids, annotators: Ids) -> Fields:
    """A tensor of class numbers, on its device."""
    (num_rows, num_columns), device = matrix.shape, table.device
    kept = ~table.isnan() if table.is_floating_point() else torch.ones_like(table, dtype=torch.bool)
    for marker in markers(missing):
        if isinstance(marker, str):
            marker = float(marker) if marker.lstrip("-").isdecimal() else np.nan
        if is_number(marker):
            kept &= table != marker
    cell = kept.reshape(-1).nonzero()[:, 0]
    found = table.reshape(-1)[cell]
    item, annotator = cell // max(num_columns, 1), cell % max(num_columns, 1)
    label = found.to(torch.int64)
    bad = (label != found) | (label < 0) | (label >= num_classes)
    if bool(bad.any()):
        n = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"{matrix.place(int(item[n]), int(annotator[n]))} is {found[n].item()}, outside the labels 0 to "
            f"{num_classes - 1}; {_hint(label, num_classes)}"
        )
    row_at, item_ids = _places(matrix.items, items, num_rows, "items")
    column_at, annotator_ids = _places(matrix.annotators, annotators, num_columns, "annotators")
    if row_at is not None:
        item = row_at.to(device)[item]
        order = torch.argsort(item, stable=True)
        item, annotator, label = item[order], annotator[order], label[order]
    if column_at is not None:
        annotator = column_at.to(device)[annotator]
    num_items = num_rows if item_ids is None else len(item_ids)
    num_annotators = num_columns if annotator_ids is None else len(annotator_ids)
    indptr = torch.zeros(num_items + 1, dtype=torch.int64, device=device)
    indptr[1:] = torch.bincount(item, minlength=num_items).cumsum(0)
    vocabulary = None
    if item_ids is not None or annotator_ids is not None:
        vocabulary = Vocabulary(
            tuple(range(num_items)) if item_ids is None else item_ids,
            tuple(range(num_annotators)) if annotator_ids is None else annotator_ids,
            tuple(range(num_classes)),
        )
    item_id = None if item_ids is None else torch.arange(num_items, device=device)
    return Fields(num_annotators, num_classes, indptr, annotator, label, None, item_id, vocabulary)


def _hint(label: Tensor, num_classes: int) -> str:
    low, high = int(label.min()), int(label.max())
    if low >= 1 and high == num_classes:
        return "labels look 1-based: subtract 1, or give classes= instead of num_classes"
    if low < 0:
        return "if it marks a missing label, name it with missing=; if it is a class, give classes="
    return "raise num_classes, or number other values with classes="


def _places(found: list[Any] | None, wanted: Ids, size: int, name: str) -> tuple[Tensor | None, tuple[Any, ...] | None]:
    """Where each row (or column) of a matrix goes, None for where it is, and the ids of the result."""
    ids = ids_of(found, wanted, size, name)
    if wanted is None:
        return None, None if found is None else tuple(ids)
    if found is None:
        return None, tuple(ids)
    axis = "row" if name == "items" else "column"
    column = Column(np.arange(size), ids)
    codes, all_ids = encode(column, wanted, name, natural=True, place=lambda n: f"{axis} {n} of matrix")
    return torch.from_numpy(codes), all_ids
