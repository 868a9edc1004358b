"""Cases of files: valid ones of every kind that can be read, with some of their bytes changed."""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import json
import lzma
import random
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import feather, parquet

from crowdnal.data import Annotations
from support.exports import EXPORTS
from support.fuzz import Case
from support.fuzz_readers import right

MOST = 64 << 20
"""Bytes that reading a file of a few hundred may take."""
ROWS = [("t1", "w1", "a"), ("t1", "w2", "b"), ("t2", "w1", "a"), ("t3", "w3", "c"), ("t3", "w1", "b")]
PIECES = (
    b",", b"\n", b"\r\n", b'"', b"\t", b";", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r", b"{", b"}", b"[", b"]", b":",
    b"null", b"-1", b"1e999", b"9" * 20, b"\\u0000", b"\\ud800", b"<", b"&", b"</", b"NaN", b"a" * 3000, b"[" * 2000,
    b"PK\x03\x04",
)  # fmt: skip


class Sample(NamedTuple):
    """A valid file, and how it is read."""

    content: bytes
    options: dict[str, Any]


@functools.cache
def samples() -> dict[str, Sample]:
    """Of every kind, by name."""
    columns = dict(zip(("task", "worker", "label"), map(list, zip(*ROWS, strict=True)), strict=True))
    csv = "task,worker,label\n" + "".join(",".join(row) + "\n" for row in ROWS)
    records = [dict(zip(columns, row, strict=True)) for row in ROWS]
    by_task: dict[str, dict[str, str]] = {}
    for task, worker, label in ROWS:
        by_task.setdefault(task, {})[worker] = label
    dense = "item,u,v,w\ni,0,1,\nj,1,1,0\nk,,0,1\n"
    plain: dict[str, str | bytes] = {
        "csv": csv,
        "quoted": 'task,worker,label\n"t,1","w ""1""",a\n"t\n2",w1,b\n',
        "tsv": csv.replace(",", "\t"),
        "utf-16": csv.encode("utf-16"),
        "dense": dense,
        "numbers": "0 1 -1\n1 1 0\n-1 0 1\n",
        "json": json.dumps(records),
        "json by task": json.dumps(by_task),
        "json lines": "".join(json.dumps(record) + "\n" for record in records),
        "matrix json": "[[0, 1], [1, -1]]",
    }
    found = {name: Sample(_bytes(content), {}) for name, content in plain.items()}
    for name, pack in (("gzip", gzip.compress), ("bzip2", bz2.compress), ("xz", lzma.compress)):
        found[name] = Sample(pack(csv.encode()), {})
    stream = io.BytesIO()
    parquet.write_table(pa.table(columns), stream)
    found["parquet"] = Sample(stream.getvalue(), {})
    stream = io.BytesIO()
    feather.write_feather(pa.table(columns), stream, compression="zstd")
    found["arrow"] = Sample(stream.getvalue(), {})
    stream = io.BytesIO()
    np.save(stream, np.array([[0, 1, -1], [1, 1, 0]]))
    found["npy"] = Sample(stream.getvalue(), {})
    for name, (format, exported, options) in EXPORTS.items():
        found[name] = Sample(_bytes(exported), {"format": format, **options})
    found["dense said"] = Sample(dense.encode(), {"format": "dense"})
    return found


def _bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode()


def read(content: bytes, options: dict[str, Any]) -> str | None:
    """What is wrong with how the file is read: annotations that break the contract, or an error without its name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers"
        path.write_bytes(content)
        tracemalloc.start()
        try:
            found = Annotations.read(path, **options)
        except ValueError as error:
            if "answers" in str(error):
                raise
            return f"an error that does not name the file: {str(error)[:200]}"
        finally:
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        return right(found) or (f"{most >> 20} MB of memory" if most > MOST else None)


def changed(content: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """With bytes inserted, dropped, swapped, repeated, cut off, or from another file."""
    out = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at, size = rng.randrange(len(out) + 1), rng.choice((1, 1, 2, 8, 40))
        match rng.randrange(7):
            case 0:
                del out[at : at + size]
            case 1:
                out[at:at] = rng.choice(PIECES)
            case 2:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 3:
                out[at:at] = out[at : at + size] * rng.choice((1, 2, 50))
            case 4:
                other = rng.choice(others)
                start = rng.randrange(len(other))
                out[at : at + size] = other[start : start + size]
            case 5 if rng.random() < 0.3:
                del out[at:]
            case _:
                out[at : at + len(piece)] = (piece := rng.choice(PIECES))
    return bytes(out)


def case(rng: random.Random) -> Case:
    """One sample, changed; sometimes read as another."""
    known = samples()
    name = rng.choice(sorted(known))
    content = changed(known[name].content, rng, [sample.content for sample in known.values()])
    options = known[name].options if rng.random() < 0.9 else rng.choice(list(known.values())).options
    return Case(f"{name} read with {options}: {content[:300]!r}", lambda: read(content, options))
