"""Texts numbered by hashes against Arrow's own numbering, and clean files against the reader that looks closely."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crowdnal.data import _csv, _hashing
from crowdnal.data._columns import read_column
from crowdnal.data.annotations import Annotations

texts = st.lists(st.one_of(st.sampled_from(["", "a", "a\0", "\0", "w10", "w9", "é" * 8]), st.text(max_size=20)))


@given(st.lists(texts, min_size=1, max_size=4), st.integers(0, 3), st.sampled_from([pa.string(), pa.large_string()]))
@settings(deadline=None)
def test_numbers_of_texts_are_those_of_arrow(pieces: list[list[str]], skip: int, kind: pa.DataType) -> None:
    chunks = [pa.array(["x", *piece], kind)[1:].slice(min(skip, len(piece))) for piece in pieces]
    found = _hashing.number_texts(chunks)
    expected = pa.chunked_array(chunks, kind).combine_chunks().dictionary_encode()
    values = expected.dictionary.to_pylist()
    if any(len(value.encode()) > 64 for value in values):
        assert found is None
        return
    codes, first = found
    every = pa.chunked_array(chunks, kind).to_pylist()
    assert codes.tolist() == expected.indices.to_pylist() and [every[n] for n in first] == values


@pytest.mark.parametrize("spread", [10, 60_000])
@pytest.mark.parametrize("in_order", [False, True])
def test_long_columns(spread: int, in_order: bool) -> None:
    numbers = np.random.default_rng(0).integers(0, spread, 120_000)
    values = [f"image {n}.jpg" for n in (np.sort(numbers) if in_order else numbers)]
    column = read_column(pa.chunked_array([values[:50_000], values[50_000:50_000], values[50_000:]]))
    assert column.values == list(dict.fromkeys(values))
    assert np.array_equal(np.array(column.values, dtype=object)[column.codes], np.array(values, dtype=object))


def test_hashes_that_collide_are_noticed(monkeypatch) -> None:
    monkeypatch.setattr(_hashing, "_ODD", (0, 0))
    assert _hashing.number_texts([pa.array(["a", "b"])]) is None
    assert _hashing.number_texts([pa.array(["a", "a"])])[0].tolist() == [0, 0]
    assert _hashing.number_texts([pa.array(["a", "b" * 65])]) is None


def test_pieces_are_numbered_as_one(monkeypatch) -> None:
    monkeypatch.setattr(_hashing, "_PIECE", 2)
    values = ["", "a long text of several words", "b", "", "b", "b\0", "c", "a long text of several words"]
    codes, first = _hashing.number_texts([pa.array(values[:3]), pa.array(values[3:])])
    assert codes.tolist() == [0, 1, 2, 0, 2, 3, 4, 1] and first.tolist() == [0, 1, 2, 5, 6]
    assert _hashing.first_rows(codes).tolist() == [0, 1, 2, 5, 6]


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
