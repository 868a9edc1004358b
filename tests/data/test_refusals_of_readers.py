"""What readers refuse by name, where pandas, NumPy or the interpreter spoke instead: found by `tests/fuzz.py`."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import feather, parquet

from crowdnal.data import Annotations

LONG = {"task": ["t"], "worker": ["w"], "label": ["b"]}


def test_a_quote_that_is_never_closed(tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('"task,worker,label\nt1,w1,a\nt1,w2,b\nt1,a\nt3,w3,c\n')
    with pytest.raises(ValueError, match="a.csv: its rows cannot be told apart .*close every quote"):
        Annotations.from_dense(str(path))


def test_numbers_of_ids_that_no_memory_holds() -> None:
    """They were counted out one by one, for hours."""
    with pytest.raises(ValueError, match=r"num_classes=\d+ is more than"):
        Annotations.from_dense([[0, 1]], num_classes=2**63 - 1)
    with pytest.raises(ValueError, match="items=.* must be 0 to"):
        Annotations.from_long(LONG, items=2**70)


@pytest.mark.parametrize("tasks", [[], ["a", "b"]])
def test_a_list_of_workers_beside_other_rows(tasks: list[str]) -> None:
    with pytest.raises(ValueError, match=rf"column 'task' has {len(tasks)} rows and 'worker' has 1; they must be as"):
        Annotations.from_long({"task": tasks, "worker": [["u", "v"]], "label": [["x", "y"]]})


def test_what_is_no_name_no_marker_no_number() -> None:
    for option in ("task", "label", "weight"):
        with pytest.raises(ValueError, match=rf"{option}=\[0, 1\] must be the name of a column"):
            Annotations.from_long(LONG, **{option: [0, 1]})
    with pytest.raises(ValueError, match="missing=.* is no label"):
        Annotations.from_dense([[0, 1]], missing=torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"annotator\[1\] is \{\}"):
        Annotations([0, 1, 3], [0, {}, (1, 2)], [0, 1, 1], num_annotators=2, num_classes=2)
    with pytest.raises(ValueError, match="on meta"):
        Annotations.from_dense(torch.zeros(2, 2, device="meta"))


@pytest.mark.parametrize("content", ["sep=;", "sep=;\n", "sep=\n", "sep=\n\n \n"])
def test_a_line_of_sep_and_nothing_else(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.csv").write_text(content, newline="")
    with pytest.raises(ValueError, match=r"a\.csv is empty"):
        Annotations.from_long(tmp_path / "a.csv")


def damaged(kind: str) -> bytes:
    """A file of a kind with some of its bytes turned over, or cut off."""
    stream = io.BytesIO()
    table = pa.table({"task": ["a", "b"], "worker": ["u", "v"], "label": ["x", "y"]})
    if kind.startswith("parquet"):
        parquet.write_table(table, stream)
    elif kind == "arrow":
        feather.write_feather(table, stream)
    elif kind == "npy":
        np.save(stream, np.array([[0, 1], [1, 0]]))
    else:
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("ann.xml", "<annotations></annotations>" * 9)
    content = bytearray(stream.getvalue())
    if kind in ("parquet cut", "npy"):
        return bytes(content[:-9])
    for at in range(40, 60) if kind == "cvat" else range(len(content) - 60, len(content) - 8):
        content[at] ^= 0xFF
    return bytes(content)


@pytest.mark.parametrize("kind", ["parquet", "parquet cut", "arrow", "npy", "cvat"])
def test_damaged_files_of_other_libraries_are_named(tmp_path: Path, kind: str) -> None:
    """Found by tests/fuzz.py: OSError of thrift, BadZipFile, TokenError of NumPy's header."""
    (tmp_path / "answers").write_bytes(damaged(kind))
    with pytest.raises(ValueError, match=r"answers(/ann\.xml)? is (damaged or cut off|not XML)"):
        Annotations.read(tmp_path / "answers", **({"format": "cvat"} if kind == "cvat" else {}))


def test_archives_whose_names_are_no_text(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("é.xml", "<annotations></annotations>")
    (tmp_path / "answers").write_bytes(stream.getvalue().replace("é".encode(), b"\xa8\xa8"))
    with pytest.raises(ValueError, match="answers is damaged or cut off"):
        Annotations.read(tmp_path / "answers", format="cvat")


def test_json_too_deep_and_records_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="answers is JSON nested too deep"):
        Annotations.read(path)
    empty = {"images": [{"file_name": "a"}], "categories": [], "annotations": []}
    for value, message in ((empty, "record 1 of images has no id"), ({**empty, "images": 3}, "images must be a list")):
        path.write_text(json.dumps(value))
        with pytest.raises(ValueError, match=f"answers.* {message}"):
            Annotations.read(path, format="coco")
