"""True labels that are known: of arrays, tables by item, and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from crowdnal.data._columns import Column, read_column
from crowdnal.data._csv import read_delimited
from crowdnal.data._files import Reading, read_file
from crowdnal.data._labels import USUAL, as_number, drop_missing, encode, numbers
from crowdnal.data._table import Table, as_ids
from crowdnal.data._text import read_dialect, read_head
from crowdnal.data._vocabulary import Ids, is_number
from crowdnal.data.annotations import Annotations


def as_gold(gold: Any, annotations: Annotations | None, num_classes: int | None = None) -> Tensor:
    """Known true classes as an int64 tensor ``[N]``, -1 where unknown, on the device of the annotations.

    Args:
        gold: by position (tensor, array, list, Series): class numbers, or class ids where these are text; or by item id
            (mapping, Series whose index are item ids): class ids. None, NaN, pd.NA and -1 are unknown.
        annotations: of N items; None where they come later, so that gold goes by position.
        num_classes: C. Default: that of the annotations.

    Raises:
        ValueError: for another length, an unknown item or class, naming the entry.
    """
    if annotations is None:
        if isinstance(gold, Mapping):
            raise ValueError("gold by item id needs the annotations: give as_gold(gold, annotations)")
        return _by_position(gold, (), num_classes or 0)
    num_classes = annotations.num_classes if num_classes is None else num_classes
    vocabulary, rows = annotations.vocabulary, annotations.item_id
    numbered = torch.arange(annotations.num_items) if rows is None else rows.cpu()
    items = numbered.tolist() if vocabulary is None else [vocabulary.items[row] for row in numbered.tolist()]
    classes = tuple(range(num_classes)) if vocabulary is None else vocabulary.classes
    if isinstance(gold, Mapping):
        return _by_item(list(gold), list(gold.values()), items, classes, num_classes).to(annotations.device)
    index: Any = getattr(gold, "index", None)
    if hasattr(index, "tolist") and set(items).issuperset(index.tolist()) and len(index):
        return _by_item(index.tolist(), gold, items, classes, num_classes).to(annotations.device)
    codes = _by_position(gold, classes, num_classes)
    if len(codes) != annotations.num_items:
        raise ValueError(f"gold must be [N] integers for N = {annotations.num_items} items, got {list(codes.shape)}")
    return codes.to(annotations.device)


def _by_position(gold: Any, classes: tuple[Any, ...], num_classes: int) -> Tensor:
    if isinstance(gold, Tensor) and gold.dtype in (torch.int64, torch.int32, torch.int16, torch.int8):
        if gold.ndim != 1:
            raise ValueError(f"gold must be [N] integers, got {list(gold.shape)}")
        bad = (gold < -1) | (gold >= num_classes)
        if bool(bad.any()):
            i = int(bad.nonzero()[0, 0])
            raise ValueError(f"gold[{i}] is {int(gold[i])}, outside [0, {num_classes}); mark unknown classes with -1")
        return gold.to(torch.int64)
    return torch.from_numpy(_codes(read_column(gold, "gold", "gold[{}]".format), classes, num_classes, by_id=False))


def _by_item(keys: list[Any], values: Any, items: list[Any], classes: tuple[Any, ...], num_classes: int) -> Tensor:
    place = {item: i for i, item in enumerate(items)}
    codes = _codes(
        read_column(values, "gold", lambda n: f"gold[{keys[n]!r}]"), classes, num_classes, by_id=True, keys=keys
    )
    gold = torch.full((len(items),), -1)
    for key, code in zip(keys, codes.tolist(), strict=True):
        if key not in place:
            raise ValueError(
                f"gold[{key!r}]: there is no such item, only {items[0]!r}, ...; leave it out, or read the "
                "annotations with items="
            )
        gold[place[key]] = code
    return gold


def _codes(column: Column, classes: tuple[Any, ...], num_classes: int, *, by_id: bool, keys: Any = None) -> Any:
    text = any(not is_number(value) for value in column.values)
    if not by_id and not text:
        values = [value if isinstance(value, int) else -2 for value in column.values]
        bad = next((u for u, value in enumerate(values) if not -1 <= value < num_classes), None)
        if bad is not None:
            n = int((column.codes == bad).argmax())
            raise ValueError(
                f"gold[{n}] is {column.values[bad]}, outside [0, {num_classes}); mark unknown classes with -1"
            )
        return np.array([*values, -1], dtype=np.int64)[column.codes]
    if -1 not in classes:
        column = column.mapped(lambda value: None if value == -1 else value)
    place = "gold[{}]".format if keys is None else lambda n: f"gold[{keys[n]!r}]"
    return encode(column, classes, "classes", natural=True, place=place)[0]


class Labels(NamedTuple):
    """A true label per item: the items, their labels numbered, and where row n stands."""

    items: list[Any]
    label: Column
    place: Callable[[int], str]

    def codes(self, classes: Ids) -> Tensor:
        """``[n]`` class of each label.

        Raises:
            ValueError: a label that is no class, naming the line.
        """
        codes = encode(self.label, classes, "classes", natural=True, place=self.place, written=True)[0]
        return torch.from_numpy(codes)


def read_labels(
    path: str | PathLike[str], *, items: Sequence[Any] | None = None, task: str = "task", label: str = "label"
) -> Labels:
    """Read true labels from a file: columns of tasks and labels, or a label per line with the items beside it.

    Args:
        path: of the file, of any kind that :meth:`Annotations.read` takes.
        items: one per line, where the file has labels only.
        task: column of the item; where it has neither name, a file of two columns is read as item and label.
        label: column of the label. Rows without one are left out.

    Raises:
        ValueError: naming the file, the line and the fix.
    """
    path, columns = Path(path), (task, label)
    if _is_text(path):
        text = read_head(path, None)
        dialect = read_dialect(text, columns, None, blanks=False)
        header = dialect.header
        if len(header) == 1 and header[0] != label:
            return _one_per_line(read_delimited(text, dialect, [label], [label], headed=False), items, label)
        if not set(columns) <= set(header):
            if len(header) != 2 or as_number(header[1]) is not None:
                raise ValueError(
                    f"{path} starts with {', '.join(header)}: it must have a header with columns {task!r} and "
                    f"{label!r} (or name yours with task= and label=)"
                )
            columns = (header[0], header[1])
        table = read_delimited(text, dialect, header, columns, headed=True)
    else:
        found = read_file(path, Reading("long"), columns, USUAL)
        assert isinstance(found, Table)
        table = found
    ids, given = (read(table, name) for name in columns)
    given = numbers(drop_missing(given, USUAL, written=True, dense=False, classes=None))
    known = np.flatnonzero(given.codes >= 0)
    if (ids.codes[known] < 0).any():
        n = int(known[(ids.codes[known] < 0).argmax()])
        raise ValueError(f"{table.place(n)}, column {columns[0]!r} is missing: name the item or drop the row")
    return Labels(
        [ids.values[code] for code in ids.codes[known].tolist()],
        given._replace(codes=given.codes[known]),
        lambda n: table.place(int(known[n])),
    )


def _one_per_line(table: Table, items: Sequence[Any] | None, label: str) -> Labels:
    if items is None:
        raise ValueError(
            f"{table.source} has one label a line, so nothing says which item it belongs to: give items=, one per "
            "line, or a table with columns of items and labels"
        )
    given = numbers(read(table, label))
    if len(items) != len(given.codes):
        raise ValueError(
            f"items= has {len(items)} names for {len(given.codes)} labels of {table.source}: give one each"
        )
    return Labels(list(items), given, table.place)


def read(table: Table, name: Any) -> Column:
    """A column of a file, numbered."""
    raw = table.column(name)
    return as_ids(raw if isinstance(raw, Column) else read_column(raw, f"column {name!r}", table.place))


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return not file.read(6).startswith((b"PAR1", b"ARROW1", b"{", b"["))
