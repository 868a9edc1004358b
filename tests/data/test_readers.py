from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.crowds import NAN, Rows, assert_equal, build, crowds, to_rows

from crowdnal.data import Annotations, Vocabulary


@given(crowds(repeats=False))
@settings(deadline=None)
def test_dense_round_trip(crowd: tuple[Rows, int, int]) -> None:
    rows, annotators, classes = crowd
    matrix = torch.full((len(rows), annotators), -1)
    for i, row in enumerate(rows):
        for r, y in row:
            matrix[i, r] = y
    a = Annotations.from_dense(matrix, num_classes=classes)
    assert to_rows(a) == [sorted(row) for row in rows]
    assert torch.equal(a.to_dense(), matrix)
    assert torch.equal(build(rows, annotators, classes).to_dense(-7), matrix.where(matrix >= 0, -7))
    as_float = matrix.double().where(matrix >= 0, NAN)
    objects = matrix.numpy().astype(object)
    objects[matrix.numpy() < 0] = pd.NA
    for other, missing in [
        (matrix.to(torch.int8), -1),
        (matrix.numpy(), -1),
        ((matrix + 1).to(torch.uint8).float() - 1, -1),
        (as_float, None),
        (as_float.numpy(), 99),
        (objects, -1),
        (objects, "none"),
        (pd.DataFrame(objects), None),
        (as_float.where(matrix >= 0, 77), (77, 78)),
        (matrix.T.contiguous().T, -1),
        (matrix.T.contiguous().T.numpy(), -1),
    ]:
        found = Annotations.from_dense(other, num_classes=classes, missing=missing)
        if isinstance(other, pd.DataFrame):  # its index names the rows
            assert found.item_id is not None and found.item_id.tolist() == list(range(len(rows)))
            found.item_id = None
        assert_equal(found, a)
    if rows:
        assert_equal(Annotations.from_dense(matrix.tolist(), num_classes=classes), a)
    assert_equal(Annotations.from_dense(matrix, classes=range(classes)), a)
    assert_equal(Annotations.from_label_matrix(matrix, num_classes=classes), a)


@given(crowds(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_long_round_trip(crowd: tuple[Rows, int, int], random) -> None:
    rows, annotators, classes = crowd
    names = [f"item {i}" for i in range(len(rows))]
    table = [(names[i], f"w{r}", "abcd"[y]) for i, row in enumerate(rows) for r, y in row]
    random.shuffle(table)
    columns = [list(column) for column in zip(*table, strict=True)] or [[], [], []]
    data = dict(zip(("task", "worker", "label"), columns, strict=True))
    fixed = {
        "items": names,
        "annotators": [f"w{r}" for r in range(annotators)],
        "classes": list("abcd"[:classes]),
    }
    a = Annotations.from_long(data, **fixed)
    assert sorted(a.to_long().itertuples(index=False, name=None)) == sorted(table)
    grouped = [[(r, y) for name, r, y in table if name == names[i]] for i in range(len(rows))]
    assert to_rows(a) == [[(int(r[1:]), "abcd".index(y)) for r, y in row] for row in grouped]
    for again in (data, pd.DataFrame(data, dtype=object), pd.DataFrame(data, dtype="category"), a.to_long()):
        assert_equal(Annotations.from_long(again, **fixed), a)
    free = Annotations.from_long(data)
    order = list(dict.fromkeys(columns[0]))
    assert free.vocabulary is not None and free.vocabulary.items == tuple(order)
    assert free.vocabulary.annotators == tuple(sorted(set(columns[1])))
    assert free.vocabulary.classes == tuple(sorted(set(columns[2])))
    expected = sorted(table, key=lambda row: order.index(row[0]))
    assert list(free.to_long().itertuples(index=False, name=None)) == expected


def test_long_dense_long() -> None:
    frame = pd.DataFrame({"task": [7, 7, 3], "worker": ["b", "a", "b"], "label": [2, 0, 1], "sure": [1, 0.5, 0]})
    a = Annotations.from_long(frame, weight="sure")
    assert a.to_dense().tolist() == [[0, 2], [-1, 1]]
    assert a.to_long().to_dict("list") == {
        "task": [7, 7, 3],
        "worker": ["b", "a", "b"],
        "label": [2, 0, 1],
        "weight": [1, 0.5, 0],
    }
    dense = Annotations.from_dense(a.to_dense(), items=[7, 3], annotators=["a", "b"], num_classes=3)
    assert dense.to_long().values.tolist() == [[7, "a", 0], [7, "b", 2], [3, "b", 1]]


@pytest.mark.parametrize(
    "ids",
    [
        [3, 1, 2],
        ["c", "a", "b"],
        [2.5, 0.5, 1.5],
        [(0, 1), (0, 0), (1, 2)],
        [True, False, True],
        [10**30, 1, 2],
    ],
)
def test_ids_of_any_kind_come_back(ids) -> None:
    objects = np.empty(3, dtype=object)
    for i, value in enumerate(ids):
        objects[i] = value
    for column in (
        ids,
        objects,
        pd.Series(ids),
        pd.Series(ids, dtype=object),
        pd.Series(ids, dtype="category"),
    ):
        a = Annotations.from_long({"task": column, "worker": column, "label": column})
        assert a.vocabulary is not None
        assert a.vocabulary.items == tuple(dict.fromkeys(ids))
        assert a.vocabulary.annotators == a.vocabulary.classes == tuple(sorted(set(ids)))
        assert set(map(type, a.vocabulary.classes)) == set(map(type, ids))
        assert sorted(map(tuple, a.to_long().values.tolist())) == sorted((i, i, i) for i in ids)


@pytest.mark.parametrize("ids", [[5, 3, 5, 9, 3], [10**15, 3, 10**15, -4, 3], [0.5, -2.0, 0.5, 1e30, -2.0]])
def test_numbers_are_items_in_order_of_appearance(ids) -> None:
    expected = tuple(dict.fromkeys(ids))
    for column in (np.array(ids), torch.tensor(ids, dtype=torch.float64 if 0.5 in ids else None), pd.Series(ids)):
        a = Annotations.from_long({"task": column, "worker": column, "label": column})
        assert a.vocabulary == Vocabulary(expected, tuple(sorted(expected)), tuple(sorted(expected)))
        assert a.to_long()["task"].tolist() == sorted(ids, key=expected.index)
        assert a.to_long()["worker"].tolist() == a.to_long()["label"].tolist() == a.to_long()["task"].tolist()


def test_numbers_come_before_text_and_a_number_is_one_id_however_it_is_typed() -> None:
    data = {"task": [7, "7", None.__class__, "07"], "worker": ["w", 3, "w", "a"], "label": [1, 10, "1", "x"]}
    a = Annotations.from_long(data)
    assert a.vocabulary == Vocabulary((7, None.__class__, "07"), (3, "a", "w"), (1, 10, "x"))
    hard = Annotations.from_long({"task": [1, 2, 3, 4], "worker": ["a"] * 4, "label": ["0", 0, "1", 1]})
    assert hard.vocabulary is not None and hard.vocabulary.classes == (0, 1) and hard.label.tolist() == [0, 0, 1, 1]


def test_integers_read_as_floats_are_integers() -> None:
    a = Annotations.from_long({"task": [0, 0, 1], "worker": [0, 1, 2], "label": [1.0, 0.0, NAN]})
    assert a.vocabulary is not None and a.vocabulary.classes == (0, 1)
    assert all(type(c) is int for c in a.vocabulary.classes) and to_rows(a) == [[(0, 1), (1, 0)], []]


def test_labels_that_are_0_to_k_keep_their_numbers() -> None:
    a = Annotations.from_long({"task": [0] * 4, "worker": [0] * 4, "label": [2, 0, 1, 2]})
    assert a.label.tolist() == [2, 0, 1, 2] and a.num_classes == 3
    one_based = Annotations.from_long({"task": [0] * 3, "worker": [0] * 3, "label": [2, 1, 2]})
    assert one_based.label.tolist() == [1, 0, 1] and one_based.to_long()["label"].tolist() == [2, 1, 2]


def test_item_rows_follow_items_argument() -> None:
    data = {"task": ["b", "a", "b"], "worker": [0, 0, 1], "label": [0, 1, 1]}
    a = Annotations.from_long(data, items=["a", "none", "b"], annotators=4, classes=["x", 0, 1])
    assert to_rows(a) == [[(0, 2)], [], [(0, 1), (1, 2)]] and (a.num_annotators, a.num_classes) == (4, 3)
    assert a.item_id is not None and a.item_id.tolist() == [0, 1, 2]


def test_worker_absent_from_a_split_keeps_its_number() -> None:
    workers = ["ann", "bob", "cem"]
    train = Annotations.from_long({"task": [0], "worker": ["cem"], "label": [0]}, annotators=workers, classes=2)
    test = Annotations.from_long({"task": [0], "worker": ["ann"], "label": [1]}, annotators=workers, classes=2)
    assert train.annotator.tolist() == [2] and test.annotator.tolist() == [0]
    assert train.num_annotators == test.num_annotators == 3


# Missing labels


MISSING = [NAN, None, pd.NA, np.nan, np.float32("nan"), pd.NaT]


@pytest.mark.parametrize("empty", MISSING)
@pytest.mark.parametrize("wrap", [list, lambda x: pd.Series(x, dtype=object), pd.Series])
def test_missing_labels_give_no_annotation(empty, wrap) -> None:
    data = {
        "task": ["x", "y", "y", "z"],
        "worker": ["u", "v", "u", "t"],
        "label": wrap(["b", empty, "a", empty]),
    }
    a = Annotations.from_long(data)
    assert a.vocabulary == Vocabulary(("x", "y", "z"), ("t", "u", "v"), ("a", "b"))
    assert to_rows(a) == [[(1, 1)], [(1, 0)], []]


def test_missing_kinds_side_by_side() -> None:
    labels = pd.Series([1, pd.NA, NAN, None, 0, "?", -1], dtype=object)
    a = Annotations.from_long({"task": range(7), "worker": [0] * 7, "label": labels}, missing=("?", -1))
    assert a.counts.tolist() == [1, 0, 0, 0, 1, 0, 0] and a.label.tolist() == [1, 0] and a.num_classes == 2
    one = Annotations.from_long({"task": [0, 1], "worker": [0, 0], "label": ["?", "a"]}, missing="?")
    assert one.num_classes == 1 and one.counts.tolist() == [0, 1]
    nullable = pd.Series([1, None, 0], dtype="Int64")
    assert Annotations.from_long({"task": [0] * 3, "worker": [0] * 3, "label": nullable}).label.tolist() == [
        1,
        0,
    ]


def test_marker_that_is_a_real_class() -> None:
    scale = torch.tensor([[-3.0, -1, NAN], [1, NAN, -1]])
    a = Annotations.from_dense(scale, missing=None)
    assert a.vocabulary is not None and a.vocabulary.classes == (-3, -1, 1)
    assert to_rows(a) == [[(0, 0), (1, 1)], [(0, 2), (2, 1)]]
    b = Annotations.from_dense(torch.tensor([[-3, -1, 9]]), missing=9, classes=[-3, -2, -1, 0, 1])
    assert to_rows(b) == [[(0, 0), (1, 2)]] and b.num_classes == 5
    with pytest.warns(UserWarning, match="-1 is read as a class, because empty cells mark"):
        assert_equal(Annotations.from_dense(scale), a)  # NaN marks what is missing, so that -1 can be a class
    assert to_rows(Annotations.from_dense(scale, missing=-1)) == [[(0, 0)], [(0, 1)]]
    assert to_rows(Annotations.from_dense(torch.tensor([[-3, -1], [1, -1]]))) == [[(0, 0)], [(0, 1)]]
    assert to_rows(Annotations.from_dense(torch.tensor([[0.0, -1, NAN]]), num_classes=2)) == [[(0, 0)]]


# Tables


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "answers.csv"
    path.write_text("item,who,answer,sure\n10,007,dog,1\n9,8,,\n10,8,cat,0.5\n9,007,NaN,1\n")
    a = Annotations.from_long(path, task="item", worker="who", label="answer", weight="sure")
    assert a.vocabulary == Vocabulary(("10", "9"), ("007", "8"), ("cat", "dog"))
    assert to_rows(a) == [[(0, 1), (1, 0)], []] and a.weight is not None and a.weight.tolist() == [1, 0.5]
    assert_equal(Annotations.from_long(str(path), task="item", worker="who", label="answer", weight="sure"), a)
    frame = pd.DataFrame({"task": [5, 3, 5], "worker": [1.5, 2.0, 1.5], "label": [1, None, 0]})
    frame.to_csv(path)
    assert_equal(Annotations.from_long(path), Annotations.from_long(frame))
    assert Annotations.from_long(path).vocabulary == Vocabulary(("5", "3"), ("1.5", "2.0"), (0, 1))


def test_dataframe_finds_rows_and_columns_by_id() -> None:
    frame = pd.DataFrame([["p", NAN], ["q", "p"]], index=["y", "x"], columns=["w2", "w1"])
    a = Annotations.from_dense(frame)
    assert a.vocabulary == Vocabulary(("y", "x"), ("w2", "w1"), ("p", "q"))
    assert to_rows(a) == [[(0, 0)], [(0, 1), (1, 0)]]
    fixed = Vocabulary(("x", "y", "z"), ("w1", "w2", "w3"), ("p", "q", "r"))
    b = Annotations.from_dense(frame, items=fixed.items, annotators=fixed.annotators, classes=fixed.classes)
    assert b.vocabulary == fixed and to_rows(b) == [[(1, 1), (0, 0)], [(1, 0)], []]
    with pytest.raises(ValueError, match=r"row 0 of matrix: 'y' is not in items"):
        Annotations.from_dense(frame, items=["x", "z"])
    with pytest.raises(ValueError, match=r"column 1 of matrix: 'w1' is not in annotators"):
        Annotations.from_dense(frame, annotators=["w2", "w3"])
    with pytest.raises(ValueError, match=r"column ids of matrix\[1\] is 'a'"):
        Annotations.from_dense(pd.DataFrame([[0, 1]], columns=["a", "a"]))


def test_a_million_rows_are_quick() -> None:
    generator = np.random.default_rng(0)
    size = 1_000_000
    frame = pd.DataFrame({"task": generator.integers(0, 80_000, size), "worker": generator.integers(0, 5000, size)})
    frame["label"] = np.array(["cat", "dog", "cow"])[generator.integers(0, 3, size)]
    frame["task"] = "image " + frame["task"].astype(str)
    start = time.perf_counter()
    a = Annotations.from_long(frame)
    a.prepare().votes()
    assert time.perf_counter() - start < 10
    assert a.num_annotations == size and len(a) == 80_000


# Errors


LONG = {"task": ["x", "y"], "worker": ["u", "v"], "label": [1, 2]}


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"items": ["x"]}, r"column 'task' of row 1 \(task 'y', worker 'v'\): 'y' is not in items"),
        (
            {},
            {"annotators": ["v"]},
            r"column 'worker' of row 0 \(task 'x', worker 'u'\): 'u' is not in annotators",
        ),
        ({}, {"classes": 2}, r"column 'label' of row 1 .*: 2 is not in classes; .*1-based: subtract 1"),
        ({"label": [0, 2]}, {"classes": 2}, r"of row 1 .*: 2 is not in classes; add it"),
        ({"label": [-1, 1]}, {"classes": 2}, r"of row 0 .*: -1 is not in classes; add it"),
        ({"worker": [-1, 0]}, {"annotators": 2}, r"of row 0 .*: -1 is not in annotators"),
        ({"label": [NAN, 3]}, {"classes": [0, 1]}, r"of row 1 .*: 3 is not in classes"),
        (
            {"label": ["1", "2"]},
            {"classes": [1, 2]},
            r"of row 0 .*: '1' is not in classes; ids of another type",
        ),
        ({"task": ["x", None]}, {}, r"column 'task' of row 1 \(task None, worker 'v'\) is missing"),
        ({"worker": pd.Series([pd.NA, "v"])}, {}, r"column 'worker' of row 0 .* is missing"),
        ({"worker": ["u"]}, {}, "column 'worker' has 1 rows and 'task' has 2"),
        ({"label": [[1], 2]}, {}, r"column 'label' of row 0 .* cannot be an id"),
        ({"label": pd.Series([0, [1]])}, {}, r"column 'label' of row 1 .* cannot be an id"),
        ({"label": np.zeros((2, 2))}, {}, "a column must have one dimension"),
        ({}, {"task": "image"}, r"no column 'image', only \['task', 'worker', 'label'\]"),
        ({"w": [1, -2]}, {"weight": "w"}, r"column 'w' of row 1 .* is -2; weights are finite"),
        ({"w": [NAN, 1]}, {"weight": "w"}, r"column 'w' of row 0 .* is nan"),
        ({"w": ["a", 1]}, {"weight": "w"}, r"column 'w' of row 0 .* is 'a'"),
        ({"label": [None, 1], "w": [1, None]}, {"weight": "w"}, r"column 'w' of row 1 .* is None"),
        ({}, {"annotators": ["u", "v", "u"]}, r"annotators\[2\] is 'u', as is annotators\[0\]"),
        ({}, {"classes": "12"}, "classes is the string '12'"),
    ],
)
def test_from_long_names_the_row(change, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        Annotations.from_long({**LONG, **change}, **options)


def test_from_long_of_something_else() -> None:
    with pytest.raises(ValueError, match="data must be a DataFrame, the path"):
        Annotations.from_long([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("matrix", "options", "message"),
    [
        (
            [[0, 1], [3, -1]],
            {"num_classes": 3},
            r"row 1, column 0 of matrix is 3, outside the labels 0 to 2; raise",
        ),
        ([[1, 2], [3, -1]], {"num_classes": 3}, r"row 1, column 0 of matrix is 3, .*1-based: subtract 1"),
        ([[0, -2]], {"num_classes": 3}, r"row 0, column 1 of matrix is -2, .*missing="),
        (
            torch.tensor([[0, -1]]),
            {"num_classes": 3, "missing": None},
            r"row 0, column 1 of matrix is -1, .*missing=",
        ),
        (np.array([[0, 0.5]]), {"num_classes": 3}, r"row 0, column 1 of matrix is 0.5"),
        (np.array([[0, np.inf]]), {"num_classes": 3}, r"row 0, column 1 of matrix is inf"),
        (np.array([["a", "b"]]), {"num_classes": 3}, r"row 0, column 0 of matrix is 'a'.*asks for integers"),
        ([[0, "b"]], {"num_classes": 3}, r"row 0, column 1 of matrix is 'b'"),
        ([["a", "b"]], {"classes": ["a"]}, r"row 0, column 1 of matrix: 'b' is not in classes"),
        ([[0, 1], [1]], {"num_classes": 3}, "row 1 of matrix has 1 labels and row 0 has 2"),
        (torch.zeros(3), {"num_classes": 3}, r"matrix must be \[N, R\]"),
        (torch.zeros(3, 2), {"num_classes": 3, "classes": "abc"}, "num_classes .* or classes, not both"),
        (torch.zeros(3, 2), {"items": ["a", "b"]}, "items has 2 ids for 3 rows"),
        (torch.zeros(3, 2), {"annotators": 3}, "annotators has 3 ids for 2 columns"),
        (
            pd.DataFrame([[0, 5]], index=["i"], columns=["u", "v"]),
            {"num_classes": 3},
            r"row 0, column 1 of matrix \(item 'i', annotator 'v'\) is 5",
        ),
    ],
)
def test_from_dense_names_the_cell(matrix, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        Annotations.from_dense(matrix, **options)
