"""Tables and matrices of labels, with ids of any kind, to the integer fields of ``Annotations``."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crowdnal._utils.extras import require
from crowdnal.data._vocabulary import Array, Ids, Vocabulary, distinct, encode, is_number, markers, read_column

CSV_MISSING = ["", "NaN", "nan", "NA", "<NA>"]


# (R, K), vocabulary, indptr, annotator, label, weight, item_id
Fields = tuple[tuple[int, int], Vocabulary | None, Tensor, Tensor, Tensor, Tensor | None, Tensor]


# Long tables


def read_long(
    data: Any,
    columns: tuple[str, str, str, str | None],
    items: Ids,
    annotators: Ids,
    classes: Ids,
    missing: Any,
) -> Fields:
    """One annotation a row; see ``Annotations.from_long``."""
    raw = _columns(data, columns)

    def where(name: str | None, n: int) -> str:
        return f"column {name!r} of row {n} (task {_at(raw[0], n)!r}, worker {_at(raw[1], n)!r})"

    wheres = [partial(where, name) for name in columns]
    task, worker = read_column(raw[0], where=wheres[0]), read_column(raw[1], where=wheres[1])
    for place, column in zip(wheres, (task, worker), strict=False):
        if len(column.codes) and column.codes.min() < 0:
            n = int(column.codes.argmin())
            raise ValueError(f"{place(n)} is missing, and only labels may be: fill it in or drop the row")
    label = read_column(raw[2], missing, wheres[2])
    item, item_ids = encode(task, items, "items", sort=False, where=wheres[0])
    annotator, annotator_ids = encode(worker, annotators, "annotators", sort=True, where=wheres[1])
    code, class_ids = encode(label, classes, "classes", sort=True, where=wheres[2])
    row = np.flatnonzero(code >= 0)
    value = None
    if columns[3] is not None:
        value = _numbers(raw[3])[row]
        bad = ~(np.isfinite(value) & (value >= 0))
        if bad.any():
            n = int(row[bad.argmax()])
            raise ValueError(
                f"{wheres[3](n)} is {_at(raw[3], n)!r}; weights are finite numbers and not negative, "
                "0 ignores an annotation"
            )
    code = code[row]
    item, annotator = item[row], annotator[row]
    if (item[1:] < item[:-1]).any():
        # A stable argsort by a plain sort of distinct keys, which numpy vectorises.
        order = np.sort(item * len(item) + np.arange(len(item))) % len(item)
        item, annotator, code = item[order], annotator[order], code[order]
        value = None if value is None else value[order]
    indptr = np.zeros(len(item_ids) + 1, dtype=np.int64)
    np.cumsum(np.bincount(item, minlength=len(item_ids)), out=indptr[1:])
    return (
        (len(annotator_ids), len(class_ids)),
        Vocabulary(item_ids, annotator_ids, class_ids),
        torch.from_numpy(indptr),
        torch.from_numpy(annotator),
        torch.from_numpy(code),
        None if value is None else torch.from_numpy(value).to(torch.get_default_dtype()),
        torch.arange(len(item_ids)),
    )


def _columns(data: Any, names: Sequence[str | None]) -> list[Any]:
    if isinstance(data, (str, os.PathLike)):
        data = _read_csv(data, [name for name in names[:3] if name is not None])
    if not isinstance(data, Mapping) and not hasattr(data, "columns"):
        raise ValueError(
            f"data must be a DataFrame, the path of a CSV file or a mapping of columns, got {type(data).__name__}"
        )
    known = list(data.columns if hasattr(data, "columns") else data)
    found = []
    for name in names:
        if name is not None and name not in known:
            raise ValueError(
                f"data has no column {name!r}, only {known}; name yours with task=, worker=, label=, weight="
            )
        found.append([] if name is None else data[name])
        if name is not None and len(found[-1]) != len(found[0]):
            raise ValueError(
                f"column {name!r} has {len(found[-1])} rows and {names[0]!r} has {len(found[0])}; they must be as long"
            )
    return found


def _read_csv(path: str | os.PathLike[str], ids: list[str]) -> Any:
    """Ids as written: numbers only where no id of the column loses anything by it, as 007 would."""
    pandas = require("pandas", extra="train")
    text = dict.fromkeys(ids, str)
    table = pandas.read_csv(path, dtype=text, keep_default_na=False, na_values=CSV_MISSING)
    for name in filter(table.__contains__, ids):
        codes, found = table[name].factorize()
        numbers = [_exact_number(value) for value in found]
        if None not in numbers and len(set(numbers)) == len(numbers):
            table[name] = pandas.Categorical.from_codes(codes, numbers)
    return table


def _exact_number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            if str(kind(text)) == text:
                return kind(text)
        except ValueError:
            pass
    return None


def _at(column: Any, n: int) -> Any:
    value = column.iloc[n] if hasattr(column, "iloc") else column[n]
    return value.item() if isinstance(value, (np.generic, Tensor)) else value


def _numbers(column: Any) -> Array:
    """As float64, NaN for what is no number."""
    array = column.detach().cpu().numpy() if isinstance(column, Tensor) else np.asarray(column)
    if array.dtype.kind in "iuf":
        return array.astype(np.float64)
    return np.fromiter((float(v) if is_number(v) else np.nan for v in column), np.float64, len(column))


# Dense matrices


def read_dense(matrix: Any, num_classes: int | None, missing: Any, items: Ids, annotators: Ids, classes: Ids) -> Fields:
    """One item a row, one annotator a column; see ``Annotations.from_dense``."""
    if num_classes is not None and classes is not None:
        raise ValueError("give num_classes (the labels are 0 to num_classes-1) or classes, not both")
    table, row_ids, column_ids = _table(matrix)
    num_rows, num_columns = table.shape
    device = table.device if isinstance(table, Tensor) else torch.device("cpu")
    row_at, item_ids = _places(row_ids, items, num_rows, "items", "row")
    column_at, annotator_ids = _places(column_ids, annotators, num_columns, "annotators", "column")

    def where(i: int, r: int) -> str:
        named = [] if row_ids is None else [f"item {row_ids[i]!r}"]
        named += [] if column_ids is None else [f"annotator {column_ids[r]!r}"]
        return f"row {i}, column {r} of matrix" + (f" ({', '.join(named)})" if named else "")

    class_ids: tuple[Hashable, ...] | None = None
    if isinstance(table, Tensor) and num_classes is not None:
        kept = ~table.isnan() if table.is_floating_point() else torch.ones_like(table, dtype=torch.bool)
        for marker in filter(is_number, markers(missing)):
            kept &= table != marker
        cell = kept.reshape(-1).nonzero()[:, 0]
        found = table.reshape(-1)[cell]
    else:
        flat = (table.detach().cpu().numpy() if isinstance(table, Tensor) else table).ravel()

        def place(n: int) -> str:
            return where(*divmod(n, num_columns))

        column = read_column(flat, missing, place)
        cells = np.flatnonzero(column.codes >= 0)
        if num_classes is None:
            codes, class_ids = encode(column, classes, "classes", sort=True, where=place)
            num_classes = len(class_ids)
            present = codes[cells]
        else:
            bad_type = [u for u, value in enumerate(column.values.tolist()) if not is_number(value)]
            if bad_type:
                n = int((column.codes == bad_type[0]).argmax())
                raise ValueError(
                    f"{place(n)} is {_at(flat, n)!r}, and num_classes={num_classes} asks for integers; name "
                    "the labels with classes= instead, or what is missing with missing="
                )
            values = column.values.astype(np.float64) if column.values.dtype == object else column.values
            present = values[column.codes[cells]]
        found = torch.from_numpy(present).to(device)
        cell = torch.from_numpy(cells).to(device)
    item, annotator = cell // max(num_columns, 1), cell % max(num_columns, 1)
    label = found.to(torch.int64)
    bad = (label != found) | (label < 0) | (label >= num_classes)
    if bool(bad.any()):
        n = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"{where(int(item[n]), int(annotator[n]))} is {found[n].item()}, outside the labels 0 to "
            f"{num_classes - 1}; {_hint(label, num_classes)}"
        )
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
    if item_ids is not None or annotator_ids is not None or class_ids is not None:
        vocabulary = Vocabulary(
            tuple(range(num_items)) if item_ids is None else item_ids,
            tuple(range(num_annotators)) if annotator_ids is None else annotator_ids,
            tuple(range(num_classes)) if class_ids is None else class_ids,
        )
    item_id = torch.arange(num_items, device=device)
    return (num_annotators, num_classes), vocabulary, indptr, annotator, label, None, item_id


def _hint(label: Tensor, num_classes: int) -> str:
    low, high = int(label.min()), int(label.max())
    if low >= 1 and high == num_classes:
        return "labels look 1-based: subtract 1, or give classes= instead of num_classes"
    if low < 0:
        return "if it marks a missing label, name it with missing=; if it is a class, give classes="
    return "raise num_classes, or number other values with classes="


def _table(matrix: Any) -> tuple[Any, list[Any] | None, list[Any] | None]:
    """Tensor of numbers or array of objects, ``[N, R]``, and the ids of a DataFrame's rows and columns."""
    row_ids = column_ids = None
    if hasattr(matrix, "index") and hasattr(matrix, "columns"):
        row_ids, column_ids = matrix.index.tolist(), matrix.columns.tolist()
        table = matrix.to_numpy()
    elif isinstance(matrix, (Tensor, np.ndarray)):
        table = matrix
    else:
        rows = [list(row) for row in matrix]
        width = len(rows[0]) if rows else 0
        for i, row in enumerate(rows):
            if len(row) != width:
                raise ValueError(f"row {i} of matrix has {len(row)} labels and row 0 has {width}; mark what is missing")
        flat = np.empty(len(rows) * width, dtype=object)
        for n, value in enumerate(value for row in rows for value in row):
            flat[n] = value
        table = flat.reshape(len(rows), width)
    if table.ndim != 2:
        raise ValueError(f"matrix must be [N, R], one row an item, got shape {list(table.shape)}")
    if isinstance(table, np.ndarray) and table.dtype.kind in "iuf":
        dtype = np.float64 if table.dtype.kind == "f" else np.int64
        table = torch.from_numpy(np.require(table, dtype, ["C", "W"]))
    elif isinstance(table, Tensor) and table.is_complex():
        raise ValueError(f"matrix must hold labels, got {table.dtype}")
    elif isinstance(table, Tensor):
        table = table.detach().to(torch.float64 if table.is_floating_point() else torch.int64)
    return table, row_ids, column_ids


def _places(
    found: list[Any] | None, wanted: Ids, size: int, name: str, axis: str
) -> tuple[Tensor | None, tuple[Hashable, ...] | None]:
    """Where each row (or column) of a matrix goes, None for where it is, and the ids of the result."""
    if found is not None:
        distinct(found, f"{axis} ids of matrix")
    if wanted is None:
        return None, None if found is None else tuple(found)
    if found is not None:
        codes, ids = encode(read_column(found), wanted, name, sort=False, where=lambda n: f"{axis} {n} of matrix")
        return torch.from_numpy(codes), ids
    ids = distinct(wanted, name)
    if len(ids) != size:
        raise ValueError(f"{name} has {len(ids)} ids for {size} {axis}s of matrix; give one a {axis}")
    return None, ids
