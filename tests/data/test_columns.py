"""Columns of any library, soft and partial answers, pickles."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from support.crowds import NAN, assert_equal, to_rows

from crowdnal.data import Annotations, Vocabulary
from crowdnal.data._columns import read_column

TEXT = ["w10", "w9", "w10", "w1"]
WHOLE = [3, -7, 3, 120]
WRAPS = {
    "list": list,
    "tuple": tuple,
    "generator": lambda values: (value for value in values),
    "values of a dict": lambda values: dict(enumerate(values)).values(),
    "object array": lambda values: np.array(values, dtype=object),
    "array": np.array,
    "masked array": lambda values: np.ma.array(values, mask=False),
    "Series": pd.Series,
    "Index": pd.Index,
    "object Series": lambda values: pd.Series(values, dtype=object),
    "Series of another index": lambda values: pd.Series(values, index=[9, 3, 3, 0]),
    "categorical": lambda values: pd.Series(values, dtype="category"),
    "Categorical": pd.Categorical,
    "nullable": lambda values: pd.Series(values).convert_dtypes(),
    "pandas on Arrow": lambda values: pd.Series(values).convert_dtypes(dtype_backend="pyarrow"),
    "Arrow array": pa.array,
    "Arrow chunks": lambda values: pa.chunked_array([values[:1], values[1:]]),
    "Arrow dictionary": lambda values: pa.array(values).dictionary_encode(),
    "polars": pl.Series,
}
NUMBERS = {
    **{kind.__name__: lambda values, kind=kind: np.array(values, kind) for kind in (np.int8, np.int16, np.int64)},
    "float": lambda values: np.array(values, float),
    "tensor": torch.tensor,
    "int8 tensor": lambda values: torch.tensor(values, dtype=torch.int8),
    "float tensor": lambda values: torch.tensor(values, dtype=torch.bfloat16),
    "sparse": lambda values: pd.Series(values, dtype="Sparse[int]"),
    "Int8": lambda values: pd.Series(values, dtype="Int8"),
}


@pytest.mark.parametrize(
    ("wrap", "values"),
    [*((wrap, values) for wrap in WRAPS for values in (TEXT, WHOLE)), *((wrap, WHOLE) for wrap in NUMBERS)],
)
def test_every_kind_of_column_is_the_same_column(wrap: str, values: list) -> None:
    make = (WRAPS | NUMBERS)[wrap]
    a = Annotations.from_long({name: make(values) for name in ("task", "worker", "label")})
    ordered = ("w1", "w9", "w10") if values is TEXT else (-7, 3, 120)
    assert a.vocabulary == Vocabulary(tuple(dict.fromkeys(values)), ordered, ordered)
    assert set(map(type, a.vocabulary.items)) == {type(values[0])}
    assert sorted(a.to_long()["label"].tolist()) == sorted(values)


@pytest.mark.parametrize(
    "labels",
    [
        [True, None, False],
        np.ma.array([1, 7, 0], mask=[False, True, False]),
        np.ma.array([1.0, 7.5, 0.0], mask=[False, True, False]),
        np.array([1, NAN, 0]),
        pd.Series([1, None, 0], dtype="Int64"),
        pd.Series([1, None, 0], dtype="Sparse[float]"),
        pd.Series([True, None, False], dtype="boolean"),
        pd.Series([1, None, 0], dtype="int64[pyarrow]"),
        pd.Series([1, None, 0], dtype="category"),
        pa.array([1, None, 0]),
        pa.array([1, None, 0]).dictionary_encode(),
        pl.Series([1, None, 0]),
        pl.Series([True, None, False]),
        torch.tensor([1.0, NAN, 0]),
    ],
    ids=lambda column: type(column).__module__.partition(".")[0],
)
def test_missing_labels_of_every_library(labels) -> None:
    a = Annotations.from_long({"task": ["x", "y", "z"], "worker": [0, 0, 0], "label": labels})
    assert a.counts.tolist() == [1, 0, 1] and a.label.tolist() == [1, 0] and a.vocabulary.classes == (0, 1)


def test_large_integers_never_go_through_float() -> None:
    big = [2**53 + 1, 2**53 + 2, 2**53 + 3]
    for column in (
        big, np.array(big), np.array(big, np.uint64), torch.tensor(big), np.array([2**63 + 1, 2**63 + 2], np.uint64),
        pd.Series([*big[:2], None, big[2]], dtype="Int64"), pl.Series([*big[:2], None, big[2]]),
        pa.array([*big[:2], None, big[2]]),
    ):  # fmt: skip
        size = len(column)
        a = Annotations.from_long({"task": range(size), "worker": [0] * size, "label": column})
        wanted = (2**63 + 1, 2**63 + 2) if size == 2 else tuple(big)
        assert a.vocabulary.classes == wanted
    frame = pd.DataFrame({"u": pd.Series([big[0], None], dtype="Int64"), "v": big[1:]})
    assert Annotations.from_dense(frame).vocabulary.classes == tuple(big)


def test_declared_orders() -> None:
    ranked = pd.Categorical(["low", "high", None, "low"], categories=["none", "low", "mid", "high"], ordered=True)
    a = Annotations.from_long({"task": range(4), "worker": [0] * 4, "label": ranked})
    assert a.vocabulary.classes == ("none", "low", "mid", "high") and a.label.tolist() == [1, 3, 1]
    rearranged = pd.Series(["b", "a", "b"], dtype=pd.CategoricalDtype(["b", "a", "c"]))
    b = Annotations.from_long({"task": rearranged, "worker": rearranged, "label": rearranged})
    assert b.vocabulary == Vocabulary(("b", "a"), ("b", "a", "c"), ("b", "a", "c"))
    marked = Annotations.from_long({"task": range(4), "worker": [0] * 4, "label": ranked}, missing="low")
    assert marked.vocabulary.classes == ("none", "mid", "high") and marked.label.tolist() == [2]
    enum = pl.Series(["y", None, "x"], dtype=pl.Enum(["y", "x"]))
    assert Annotations.from_long({"task": range(3), "worker": [0] * 3, "label": enum}).vocabulary.classes == ("y", "x")
    # pandas sorts what it finds as text: that is no order which somebody declared
    found = pd.Series(["w10", "w9"], dtype="category")
    assert Annotations.from_long({"task": found, "worker": found, "label": found}).vocabulary.annotators == (
        "w9",
        "w10",
    )


@pytest.mark.parametrize("shape", ["pandas", "polars", "arrow", "structured", "masked", "records", "nested", "mapping"])
def test_every_kind_of_table(shape: str) -> None:
    data = {"task": ["b", "a", "b"], "worker": ["v", "u", "u"], "label": [1, 0, 0]}
    rows = list(zip(*data.values(), strict=True))
    kinds = [("task", "U2"), ("worker", "U2"), ("label", int)]
    table: object = {
        "pandas": lambda: pd.DataFrame(data),
        "polars": lambda: pl.DataFrame(data),
        "arrow": lambda: pa.table(data),
        "structured": lambda: np.array(rows, dtype=kinds),
        "masked": lambda: np.ma.array(np.array(rows, dtype=kinds)),
        "records": lambda: [dict(zip(data, row, strict=True)) for row in rows],
        "nested": lambda: {"b": {"v": 1, "u": 0}, "a": {"u": 0}},
        "mapping": lambda: data,
    }[shape]()
    assert_equal(Annotations.from_long(table), Annotations.from_long(data))
    assert Annotations.from_long(table).vocabulary == Vocabulary(("b", "a"), ("u", "v"), (0, 1))


@pytest.mark.parametrize(
    "matrix",
    [
        pd.DataFrame({"u": [1, None], "v": [0, 1]}, dtype="Int8"),
        pd.DataFrame({"u": [1, None], "v": [0, 1]}, dtype="category"),
        pd.DataFrame({"u": [1, None], "v": pd.array([0, 1], dtype="int64[pyarrow]")}),
        pd.DataFrame({"u": pd.arrays.SparseArray([1, NAN]), "v": [0, 1]}),
        pl.DataFrame({"u": [1, None], "v": [0, 1]}),
        pa.table({"u": [1, None], "v": [0, 1]}),
        {"u": [1, None], "v": [0, 1]},
        np.array([(1, 0), (-1, 1)], dtype=[("u", int), ("v", int)]),
        np.ma.array([[1, 0], [7, 1]], mask=[[False, False], [True, False]]),
        [[True, False], [None, True]],
        torch.tensor([[1, 0], [-1, 1]], dtype=torch.int8),
        ((1, 0), (NAN, 1)),
    ],
    ids=lambda matrix: type(matrix).__module__.partition(".")[0],
)
def test_every_kind_of_matrix(matrix) -> None:
    for options in ({}, {"num_classes": 2}, {"classes": [0, 1]}):
        a = Annotations.from_dense(matrix, **options)
        assert to_rows(a) == [[(0, 1), (1, 0)], [(1, 1)]] and a.num_classes == 2
        if hasattr(matrix, "columns") or isinstance(matrix, Mapping):
            assert a.vocabulary.annotators == ("u", "v")


OK = {"task": [0, 1], "worker": [0, 1], "label": [0, 1]}


@pytest.mark.parametrize("kind", [np.int8, np.int16, torch.int8, torch.int16])
def test_narrow_integers_do_not_overflow(kind) -> None:
    """Ids further apart than their type holds: two annotators became one."""
    info = torch.iinfo(kind) if isinstance(kind, torch.dtype) else np.iinfo(kind)
    ends = [info.min, info.max]
    column = torch.tensor(ends, dtype=kind) if isinstance(kind, torch.dtype) else np.array(ends, kind)
    a = Annotations.from_long({"task": column, "worker": column, "label": column})
    assert a.vocabulary == Vocabulary(tuple(ends), tuple(ends), tuple(ends)) and a.annotator.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"worker": None}, "column 'worker' is NoneType"),
        ({"worker": 3}, "column 'worker' is int"),
        ({"worker": "ab"}, "column 'worker' is str"),
        ({"worker": {1, 2}}, "column 'worker' is set"),
        ({"label": [[1], {}]}, r"column 'label' of row 0 .* is \[1\], which cannot be an id"),
        ({"label": pa.array([[1], [2]])}, r"column 'label' of row 0 .* cannot be an id"),
        ({"weight": np.ones((2, 2))}, r"column 'weight': a column must have one dimension, got shape \[2, 2\]"),
        ({"weight": ["a", 1]}, r"column 'weight' of row 0 .* is 'a'; weights are finite"),
    ],
)
def test_what_is_no_column_is_named(change, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Annotations.from_long({**OK, **change}, weight="weight" if "weight" in change else None)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Annotations.from_long(OK, annotators=3.0), "annotators is 3.0; give a list of hashable ids"),
        (lambda: Annotations.from_long(OK, annotators=[[1], [2]]), "annotators is .*give a list of hashable ids"),
        (lambda: Annotations.from_dense(5), r"matrix must be \[N, R\], .* got int"),
        (lambda: Annotations.from_dense(["ab", "cd"]), "row 0 of matrix is 'ab'; give a list of labels"),
        (lambda: Annotations.from_dense([{"a": 1}]), "row 0 of matrix is {'a': 1}; give a list"),
        (lambda: Annotations.from_dense(torch.zeros(2, 2).to_sparse(), num_classes=2), "matrix is sparse"),
        (lambda: Annotations.from_dense([[0]], num_classes="3"), "num_classes must be an integer, 0 or more; got '3'"),
        (lambda: Annotations.from_dense([[0]], num_classes=2.0), "num_classes must be an integer, 0 or more; got 2.0"),
        (lambda: Annotations.from_dense([], num_classes=-1), "num_classes must be an integer, 0 or more; got -1"),
        (lambda: Annotations.from_long(OK).to_dense(1.5), "missing must be an integer"),
        (lambda: Annotations.from_long(pd.DataFrame([[0, 1, 2, 3]], columns=["task", "worker", "label", "label"])),
         "data has two columns 'label'"),
        (lambda: Annotations([0, 1], [0], [0], num_annotators=1, num_classes=2**70), "num_classes must be"),
        (lambda: Annotations([0, 1], [0], [0], num_annotators=1, num_classes=1, weight=["a"]), "weight must be real"),
        (lambda: Annotations([0, 1], [0], [0], num_annotators=1, num_classes=1, vocabulary="abc"),
         "vocabulary must be a crowdnal.Vocabulary, got str"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_annotators_side_by_side_in_a_cell_are_told() -> None:
    frame = {"task": [1, 2], "annotators": ["Ann1,Ann2", "Ann2,Ann3,Ann1"], "given": ["0,1", "1,1,0"]}
    with pytest.warns(UserWarning, match="worker 'Ann1,Ann2' with label '0,1' is read as one annotator"):
        Annotations.from_long(frame, worker="annotators", label="given")


def test_words_that_may_be_no_label_are_told() -> None:
    with pytest.warns(UserWarning, match="'None', 'unsure' are read as classes"):
        a = Annotations.from_long({"task": range(4), "worker": [0] * 4, "label": ["b", "unsure", "None", "a"]})
    assert a.vocabulary.classes == ("None", "a", "b", "unsure")


# Soft and partial answers


def test_probabilities_second_choices_and_confidence() -> None:
    data = {
        "task": ["x", "y", "z"], "worker": ["u", "v", "u"], "cat": [0.25, 0.0, None], "dog": [0.75, 1.0, None],
        "first": ["cat", "dog", "cat"], "second": ["dog", None, "cow"], "sure": [1.0, 0.5, 0.25],
    }  # fmt: skip
    soft = Annotations.from_long(data, probabilities=["cat", "dog"], weight="sure")
    assert to_rows(soft) == [[(0, 0), (0, 1)], [(1, 1)], []] and soft.vocabulary.classes == ("cat", "dog")
    assert soft.weight.tolist() == [0.25, 0.75, 0.5]
    assert soft.votes().tolist() == [[0.25, 0.75], [0, 0.5], [0, 0]]
    assert Annotations.from_long(data, probabilities=["cat", "dog"], classes=[0, 1]).vocabulary.classes == (0, 1)
    two = Annotations.from_long(data, label={"first": 1.0, "second": 0.5}, weight="sure")
    assert two.vocabulary.classes == ("cat", "cow", "dog")
    assert to_rows(two) == [[(0, 0), (0, 2)], [(1, 2)], [(0, 0), (0, 1)]]
    assert two.weight.tolist() == [1, 0.5, 0.5, 0.25, 0.125]
    for value in (1.5, -0.1, "much"):
        with pytest.raises(
            ValueError, match=r"column 'dog' of row 1 \(task 'y', worker 'v'\) is .*; probabilities are"
        ):
            Annotations.from_long({**data, "dog": [0.75, value, None]}, probabilities=["cat", "dog"])
    with pytest.raises(ValueError, match="probabilities names 2 columns for 3 classes"):
        Annotations.from_long(data, probabilities=["cat", "dog"], classes=3)


def test_unsure_is_a_label_that_is_no_class_or_missing() -> None:
    data = {"task": range(4), "worker": [0] * 4, "label": ["b", "unsure", "a", "zebra"]}
    a = Annotations.from_long(data, unsure="unsure")
    assert a.vocabulary.classes == ("a", "b", "zebra", "unsure") and a.label.tolist() == [1, 3, 0, 2]
    assert Annotations.from_long(data, unsure="unsure", classes=["zebra", "b", "a"]).label.tolist() == [1, 3, 2, 0]
    assert Annotations.from_long({**data, "label": ["b", "a", "a", "b"]}, unsure="unsure").num_classes == 3
    assert Annotations.from_long(data, missing="unsure").num_classes == 3


@pytest.mark.parametrize(
    "times",
    [
        [1, 3, 2, 5, 4],
        [10**18 + 1, 10**18 + 3, 10**18 + 2, 10**18 + 5, 10**18 + 4],
        ["9", "11", "10", "13", "12"],
        ["2024-01-09", "2024-01-11T00:00:00Z", "2024-01-10", "2024-01-13", "2024-01-12"],
        ["Mon Mar 02 10:00:00 2020", "Mon Mar 02 10:02:00 2020", "Mon Mar 02 10:01:00 2020", "Tue Mar 03 09:00:00 2020",
         "Tue Mar 03 08:00:00 2020"],
        pd.to_datetime(pd.Series([1, 3, 2, 5, 4]), unit="s"),
    ],
)  # fmt: skip
def test_the_last_answer_counts_if_asked(times) -> None:
    data = {
        "task": ["x", "x", "x", "y", "x"], "worker": ["u", "u", "u", "u", "v"], "label": [0, 1, 2, 0, 2],
        "sure": [1, 2, 3, 4, 5], "at": times,
    }  # fmt: skip
    a = Annotations.from_long(data, last="at", weight="sure")
    assert a.to_long().values.tolist() == [["x", "u", 1, 2], ["x", "v", 2, 5], ["y", "u", 0, 4]]
    b = Annotations.from_long(data, last=True)
    assert b.to_long().values.tolist() == [["x", "u", 2], ["x", "v", 2], ["y", "u", 0]]
    assert Annotations.from_long(data).num_annotations == 5
    later = Annotations.from_long({**data, "label": [0, 1, None, 0, 2]}, last=True)  # no label is no answer
    assert later.to_long()["label"].tolist() == [1, 2, 0]


def test_times_that_are_none_are_named() -> None:
    data = {"task": [0, 0], "worker": [0, 0], "label": [0, 1]}
    with pytest.raises(ValueError, match=r"column 'at' of row 1 .* is 'soon', which is no time"):
        Annotations.from_long({**data, "at": ["2024-01-01", "soon"]}, last="at")
    with pytest.raises(ValueError, match=r"column 'at' of row 0 .* is missing: last= needs the time"):
        Annotations.from_long({**data, "at": [None, 3]}, last="at")


# Pickles


def test_pickles_and_weights_only_files_name_a_public_path() -> None:
    a = Annotations.from_long({"task": ["x", "y"], "worker": ["u", "v"], "label": [1, 2]}).prepare()
    text = pickle.dumps(a, protocol=0).decode("latin-1")
    assert "crowdnal.data\nAnnotations" in text and "crowdnal.data\nrestore_vocabulary" in text
    assert "crowdnal.data.a" not in text and "crowdnal.data._" not in text
    buffer = io.BytesIO()
    torch.save({"annotations": a}, buffer)
    buffer.seek(0)
    for again in (
        pickle.loads(pickle.dumps(a)),
        torch.load(buffer, weights_only=True)["annotations"],
        copy.deepcopy(a),
    ):
        assert_equal(again, a)
        assert again.vocabulary == a.vocabulary and type(again) is Annotations


def test_the_same_value_is_numbered_once() -> None:
    column = read_column(pd.Series([1, True, 1.0, "1", None, np.int8(1)], dtype=object))
    assert column.values == [1] and column.codes.tolist() == [0, 0, 0, 0, -1, 0]
    mapped = column.mapped(lambda value: None)
    assert mapped.values == [] and mapped.codes.tolist() == [-1] * 6
