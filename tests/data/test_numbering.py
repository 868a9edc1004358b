"""Texts numbered natively against Arrow's own numbering, and clean files against the reader that looks closely."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import crowdnal
from crowdnal.data import _csv, _numbering
from crowdnal.data._columns import read_column
from crowdnal.data.annotations import Annotations

texts = st.lists(st.one_of(st.sampled_from(["", "a", "a\0", "\0", "w10", "w9", "é" * 8]), st.text(max_size=20)))


@given(st.lists(texts, min_size=1, max_size=4), st.integers(0, 3), st.sampled_from([pa.string(), pa.large_string()]))
@settings(deadline=None)
def test_numbers_of_texts_are_those_of_arrow(pieces: list[list[str]], skip: int, kind: pa.DataType) -> None:
    chunks = [pa.array(["x", *piece], kind)[1:].slice(min(skip, len(piece))) for piece in pieces]
    expected = pa.chunked_array(chunks, kind).combine_chunks().dictionary_encode()
    codes, found = _numbering.number_texts(tuple(chunks))
    assert codes.tolist() == expected.indices.to_pylist() and found == expected.dictionary.to_pylist()
    if len(codes):
        buffers = [_numbering._buffers(chunk) for chunk in chunks if len(chunk)]
        by_arrow = _numbering._by_arrow(*(list(part) for part in zip(*buffers, strict=True)))
        assert by_arrow[0].tolist() == codes.tolist() and [len(part) for part in by_arrow] == [len(codes), len(found)]


@pytest.mark.parametrize("spread", [10, 60_000])
@pytest.mark.parametrize("in_order", [False, True])
def test_long_columns(spread: int, in_order: bool) -> None:
    numbers = np.random.default_rng(0).integers(0, spread, 120_000)
    values = [f"image {n}.jpg" for n in (np.sort(numbers) if in_order else numbers)]
    column = read_column(pa.chunked_array([values[:50_000], values[50_000:50_000], values[50_000:]]))
    assert column.values == list(dict.fromkeys(values))
    assert np.array_equal(np.array(column.values, dtype=object)[column.codes], np.array(values, dtype=object))


def test_texts_that_differ_behind_their_first_bytes_or_in_zeros() -> None:
    texts = [
        "",
        "\0",
        "\0" * 8,
        "\0" * 9,
        *("x" * n + "y" for n in range(40)),
        *("x" * 16 + c + "z" * 9 for c in "abc"),
    ]
    codes, found = _numbering.number_texts([pa.array(texts[:7]), pa.array(texts[7:] + texts)])
    assert found == texts and codes.tolist() == [*range(len(texts)), *range(len(texts))]


@pytest.mark.parametrize("distinct", [1, 4_000, 100_000])
def test_a_table_that_grows(distinct: int) -> None:
    numbers = np.random.default_rng(0).integers(0, distinct, 120_000)
    codes, found = _numbering.number_texts([pa.array([f"image {n}.jpg" for n in numbers])])
    assert found == [f"image {n}.jpg" for n in dict.fromkeys(numbers.tolist())]
    assert [found[code] for code in codes[:1000]] == [f"image {n}.jpg" for n in numbers[:1000]]


def test_a_list_of_pieces_is_emptied_and_a_tuple_is_not() -> None:
    pieces = [pa.array(["a", "b"]), pa.array([], pa.string())]
    kept = tuple(pieces)
    assert _numbering.number_texts(kept)[1] == _numbering.number_texts(pieces)[1] == ["a", "b"]
    assert pieces == [] and len(kept) == 2


@pytest.mark.skipif(crowdnal.backend()["cpu"] != "native", reason="what the native kernel refuses")
@pytest.mark.parametrize(
    ("contents", "ends", "wrong"),
    [
        ([torch.zeros(3, dtype=torch.uint8)], [], "as many"),
        ([torch.zeros(3)], [torch.tensor([0, 3])], "uint8"),
        ([torch.zeros(3, dtype=torch.uint8)], [torch.tensor([0.0, 3.0])], "int32 or int64"),
        ([torch.zeros(3, dtype=torch.uint8)], [torch.tensor([], dtype=torch.int64)], r"shape \[texts \+ 1\]"),
        ([torch.zeros(3, dtype=torch.uint8)], [torch.tensor([0, 4])], "text 0 reaches beyond"),
        ([torch.zeros(3, dtype=torch.uint8)], [torch.tensor([0, 2, 1])], "text 1 reaches beyond"),
        ([torch.zeros(3, dtype=torch.uint8)], [torch.tensor([-1, 2])], "text 0 reaches beyond"),
    ],
)
def test_the_op_refuses_what_it_could_not_read(contents: list, ends: list, wrong: str) -> None:
    with pytest.raises(RuntimeError, match=wrong):
        torch.ops.crowdnal.number_texts(contents, ends)


def test_first_rows(monkeypatch) -> None:
    monkeypatch.setattr(_numbering, "_PIECE", 2)
    assert _numbering.first_rows(np.array([0, 1, 2, 0, 2, 3, 4, 1])).tolist() == [0, 1, 2, 5, 6]


@pytest.mark.parametrize("progress", [False, True])
def test_parquet_by_row_groups(tmp_path, progress: bool) -> None:
    rows = {
        "worker": ["w2", "w1", "w2", "w3"],
        "task": ["b", "a", "a", "c"],
        "label": ["x", None, "y", "x"],
        "n": [1] * 4,
    }
    path, seen = tmp_path / "answers.parquet", []
    pyarrow.parquet.write_table(pa.table(rows), path, row_group_size=2)
    a = Annotations.read(path, progress=seen.append if progress else None)
    assert a.vocabulary.items == ("b", "a", "c") and a.vocabulary.annotators == ("w1", "w2", "w3")
    assert a.to_dense().tolist() == [[-1, 0, -1], [-1, 1, -1], [-1, -1, 0]]
    assert seen == ([path.stat().st_size // 2, path.stat().st_size] if progress else [])
    pyarrow.parquet.write_table(pa.table(rows)[:0], path)
    assert Annotations.read(path, classes=["x", "y"]).num_items == 0


CLEAN = "task,worker,label\na,w1,0\nb,w1,1\na,w2,0\n"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (CLEAN, True),
        (CLEAN.replace("\n", "\r\n"), True),
        ("\ufeff" + CLEAN, True),
        ("sep=,\n" + CLEAN, True),
        ("\n\n" + CLEAN.replace("b,", "\nb,") + "\n", True),
        ('"task","worker","label"\n"a","w1","0"\n"b",w1,1\na,"w2",0', True),
        ('note,task,worker,label\n"a,b""c""",a,w1,0\n"",b,w1,1\n"x",a,w2,0\n', True),
        (CLEAN.replace(",", "\t"), True),
        (CLEAN + "task,worker,label\n", True),
        ('note,task,worker,label\n"a\nb",a,w1,0\n"",b,w1,1\n"x",a,w2,0\n', False),  # a cell over two lines
        ('task,worker,label\na, "w1",0\nb,w1,1\na,w2,0\n', False),  # a quote behind a blank
        (CLEAN.replace("w1,0", "w1,0,"), False),
        ('note,task,worker,label\n,a,w1,0\n"x\ny",b,w1,1\n,a,w2,0', False),
        ('note,task,worker,label\n,a,w1,0\n"x\ry",b,w1,1\n,a,w2,0', False),
        (CLEAN + ",,\n  \n", False),
    ],
)
def test_clean_files_need_no_closer_look(tmp_path, monkeypatch, text: str, clean: bool) -> None:
    path = tmp_path / "answers.csv"
    path.write_bytes(text.encode())
    looked: list[int] = []
    parse = _csv._parse
    monkeypatch.setattr(_csv, "_parse", lambda *given, **more: looked.append(1) or parse(*given, **more))
    a = Annotations.read(path)
    assert bool(looked) is not clean
    assert a.vocabulary.items == ("a", "b") and a.vocabulary.annotators == ("w1", "w2")
    assert a.to_dense().tolist() == [[0, 0], [1, -1]]
    monkeypatch.setattr(_csv, "read_clean", lambda *_: None)
    b = Annotations.read(path)
    assert a.vocabulary == b.vocabulary and a.to_dense().equal(b.to_dense())
