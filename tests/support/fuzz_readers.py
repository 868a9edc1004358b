"""Cases of the readers: tables, matrices, fields and files, most of them broken."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from crowdnal.data import Annotations, as_annotations, collate, concat
from support.fuzz import Case

CELLS: tuple[Any, ...] = (
    0, 1, 2, -1, 2.0, 1.5, "a", "b", "", " ", "0", "01", "NA", None, float("nan"), float("inf"), 2**63 - 1,
    -(2**63), 2**70, True, [1], {}, (1, 2), b"x", "\x00", "é", "\ud800", 1e300, np.int8(-128), np.float32(1),
    object(),
)  # fmt: skip
VALUES: tuple[Any, ...] = (*CELLS, range(3), [], [0, 1], [[0, 1]], torch.zeros(2, 2), np.zeros(3), "abc", lambda: 0)
LINES = b"task,worker,label\nt1,w1,a\nt1,w2,b\nt2,w1,a\nt3,w3,c\n"
BYTES = (b",", b"\n", b'"', b"\t", b";", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r", b"{", b"]", b"a" * 3000, b"1e999")
ENDINGS = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".csv.gz", ".parquet", ".npy", ".xlsx", "")


def case(rng: random.Random) -> Case:
    """One of the ways in."""
    return rng.choice((_fields, _long, _long, _dense, _file, _file, _joined))(rng)


def _fields(rng: random.Random) -> Case:
    given: dict[str, Any] = {
        "indptr": [0, 1, 3],
        "annotator": [0, 1, 0],
        "label": [0, 1, 1],
        "num_annotators": 2,
        "num_classes": 2,
        "weight": [1.0, 2.0, 0.5],
    }
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice([*given, "item_id", "vocabulary"])
        old = given.get(name)
        if isinstance(old, list) and rng.random() < 0.6:
            old = list(old)
            old[rng.randrange(len(old))] = rng.choice(CELLS)
            given[name] = rng.choice((old, old + [rng.choice(CELLS)], old[:-1], [old]))
        else:
            given[name] = rng.choice(VALUES)
    return Case(f"Annotations({given})", lambda: right(Annotations(**given)))


def _long(rng: random.Random) -> Case:
    rows = rng.choice((0, 1, 3, 6))
    table: dict[str, Any] = {
        name: [rng.choice(pool) for _ in range(rows)]
        for name, pool in (("task", ("t1", "t2", 3)), ("worker", ("w", "v")), ("label", ("a", "b")))
    }
    options: dict[str, Any] = {}
    name = rng.choice(sorted(table))
    change = rng.randrange(5)
    if change == 0 and rows:
        table[name][rng.randrange(rows)] = rng.choice(CELLS)
    elif change == 1:
        table[name] = [rng.choice(CELLS) for _ in range(rows)]
    elif change == 2:
        table[name] = rng.choice((*VALUES, (x for x in range(rows))))
    elif change == 3:
        option = rng.choice(("weight", "items", "annotators", "classes", "missing", "task", "label", "unsure"))
        options[option] = rng.choice(VALUES)
    else:
        table = {key: np.array(value, dtype=object) for key, value in table.items()}
        table[name] = rng.choice(
            (np.zeros((rows, 2)), np.zeros(rows + 1), torch.zeros(rows).int(), np.zeros(rows, "int8"))
        )
    return Case(f"from_long({table}, {options})", lambda: right(Annotations.from_long(table, **options)))


def _dense(rng: random.Random) -> Case:
    rows = [[rng.choice((0, 1, 2, -1)) for _ in range(3)] for _ in range(rng.choice((0, 1, 3)))]
    matrix: Any = rows
    change = rng.randrange(4)
    if change == 0 and rows:
        rows[0][rng.randrange(3)] = rng.choice(CELLS)
    elif change == 1:
        matrix = rng.choice(VALUES)
    elif change == 2 and rows:
        given = torch.tensor(rows)
        array = np.array(rows)
        others = (given.to_sparse(), given.to("meta"), given.float() * 1e30, given.to(torch.int8))
        matrix = rng.choice((*others, array[None], array.astype("complex64"), array.astype("int8")))
    options = {rng.choice(("num_classes", "missing", "items", "annotators", "classes")): rng.choice(VALUES)}
    options = options if rng.random() < 0.5 else {}
    return Case(f"from_dense({matrix!r}, {options})", lambda: right(Annotations.from_dense(matrix, **options)))


def _joined(rng: random.Random) -> Case:
    a = Annotations([0, 1, 2], [0, 1], [0, 1], num_annotators=2, num_classes=2)
    value = rng.choice(VALUES)
    calls = {
        "collate": lambda: collate([a, value]),
        "concat": lambda: concat([a, value]),
        "as_annotations": lambda: as_annotations(value, num_annotators=2, num_classes=2),
        "getitem": lambda: a[value],
        "select": lambda: a.select(value),
    }
    name = rng.choice(sorted(calls))
    return Case(f"{name} of {value!r}", lambda: right(calls[name]()))


def _file(rng: random.Random) -> Case:
    content = bytearray(LINES)
    for _ in range(rng.choice((1, 1, 2, 4, 30))):
        at = rng.randrange(len(content) + 1)
        if rng.random() < 0.3:
            del content[at : at + rng.choice((1, 3, 20))]
        else:
            content[at:at] = rng.choice((*BYTES, bytes([rng.randrange(256)])))
    content = bytearray(b"") if rng.random() < 0.03 else content
    name, reader = "a" + rng.choice(ENDINGS), rng.choice(("from_long", "from_dense"))

    def read() -> str | None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(content)
            return right(getattr(Annotations, reader)(str(path)))

    return Case(f"{reader} of a file {name}: {bytes(content)[:300]!r}", read)


def right(a: Any) -> str | None:
    """Whether the annotations keep the contract."""
    if not isinstance(a, Annotations):
        return None
    inside = bool(((a.label >= 0) & (a.label < a.num_classes) & (a.annotator < a.num_annotators)).all())
    ends = int(a.indptr[0]) == 0 and int(a.indptr[-1]) == a.num_annotations and bool((a.indptr.diff() >= 0).all())
    weights = a.weight is None or bool((a.weight.isfinite() & (a.weight >= 0)).all())
    return (
        None
        if inside and ends and weights and bool((a.annotator >= 0).all())
        else "annotations that break the contract"
    )
