from __future__ import annotations

import copy
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import assert_close
from support.crowds import NAN, assert_equal, build, to_rows, weighted

from crowdnal.data import Annotations, Vocabulary, annotations, as_annotations, collate, concat, of_classes


@given(weighted())
@settings(deadline=None)
def test_item_order_counts_votes(a: Annotations) -> None:
    rows = to_rows(a)
    assert a.item.tolist() == [i for i, row in enumerate(rows) for _ in row]
    assert a.counts.tolist() == list(map(len, rows))
    annotator = a.annotator.tolist()
    assert a.order.tolist() == sorted(range(len(annotator)), key=lambda n: annotator[n])
    assert a.order is a.order and a.item is a.item
    plain, total = np.zeros((len(rows), a.num_classes)), np.zeros((len(rows), a.num_classes))
    weight = [1.0] * a.num_annotations if a.weight is None else a.weight.tolist()
    for n, (i, y) in enumerate(zip(a.item.tolist(), a.label.tolist(), strict=True)):
        plain[i, y] += 1
        total[i, y] += weight[n]
    np.testing.assert_array_equal(a.votes(weighted=False).numpy(), plain)
    assert_close(a.votes().numpy(), total, rtol=1e-6)
    assert len(a) == a.num_items == len(rows) == len(list(a))


def assert_planned(a: Annotations) -> None:
    order = a.order
    rows = torch.stack([order, a.item[order], a.annotator[order], a.label[order]], 1)
    assert a.plan is not None and a.plan.dtype == torch.int32 and torch.equal(a.plan.long(), rows)


@given(weighted(), st.data())
@settings(deadline=None)
def test_the_plan_is_never_that_of_other_annotations(a: Annotations, data: st.DataObject) -> None:
    """Of whatever is made of annotations that have one."""
    assert_planned(a)
    assert a.plan is a.plan and a.to("cpu").plan is a.plan and a.fields.plan is a.plan
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=a.num_annotations, max_size=a.num_annotations)))
    groups = torch.arange(a.num_annotators).flip(0) // 2
    made = [a[::-1], a.select(mask.bool()), concat([a, a[:1], a]), pickle.loads(pickle.dumps(a)), copy.deepcopy(a)]
    made += [collate([a, a]), a.regroup(groups, len(groups)), a.each_alone(), a.each_label(2), a.every_label(2)]
    made += [of_classes(a, data.draw(st.integers(0, a.num_classes)))]
    for b in made:
        assert_planned(b)


def test_the_plan_needs_numbers_that_fit() -> None:
    for sizes in ({"num_annotators": 2**31, "num_classes": 2}, {"num_annotators": 2, "num_classes": 2**31}):
        assert Annotations([0, 1], [0], [1], **sizes).prepare().plan is None


@pytest.mark.parametrize("gpu", [True, False])
def test_a_plan_is_prepared_where_there_is_a_gpu(gpu: bool, monkeypatch) -> None:
    monkeypatch.setattr(annotations, "_has_gpu", lambda: gpu)
    for a in (build([[(0, 0)], [(1, 1)]], 2, 2).prepare(), collate([build([[(0, 0)]], 2, 2)] * 2)):
        assert (a.fields.plan is not None) == gpu


@given(weighted(), st.data())
@settings(deadline=None)
def test_indexing_is_list_indexing(a: Annotations, data: st.DataObject) -> None:
    size, rows = len(a), to_rows(a)
    ids = list(range(size)) if a.item_id is None else a.item_id.tolist()
    weights = None if a.weight is None else torch.split(a.weight, a.counts.tolist())
    some = st.lists(st.integers(-size, size - 1), max_size=9) if size else st.just([])
    picked = data.draw(some)
    mask = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    cut = data.draw(st.slices(size))
    cases = [
        (cut, list(range(size))[cut]),
        (picked, picked),
        (np.array(picked, dtype=np.int32), picked),
        (torch.tensor(picked, dtype=torch.int64), picked),
        (torch.tensor(mask, dtype=torch.bool), [i for i in range(size) if mask[i]]),
        *((i, [i]) for i in picked),
        *((torch.tensor(i), [i]) for i in picked),
    ]
    for index, expected in cases:
        b = a[index]
        assert to_rows(b) == [rows[i] for i in expected]
        assert b.item_id is not None and b.item_id.tolist() == [ids[i] for i in expected]
        assert b.item.tolist() == [j for j, i in enumerate(expected) for _ in rows[i]]
        assert (b.weight is None) == (weights is None)
        if weights is not None and b.weight is not None and expected:
            assert torch.equal(b.weight, torch.cat([weights[i] for i in expected]))


def test_what_is_cached_in_inference_mode_serves_training() -> None:
    a = build([[(1, 0), (0, 1)], [(0, 1)]], 2, 2)
    with torch.inference_mode():
        a.prepare()
    scores = torch.ones(2, 2, requires_grad=True)
    (scores * scores)[a.item][a.order].sum().backward()
    assert scores.grad is not None and scores.grad.tolist() == [[4, 4], [2, 2]]


@pytest.mark.parametrize(
    "index",
    [
        3,
        -4,
        torch.tensor(3),
        torch.tensor(True),
        [0, 3],
        torch.tensor([-4]),
        torch.tensor([True]),
        [0.5],
        [[0]],
    ],
)
def test_index_out_of_range(index) -> None:
    with pytest.raises(IndexError):
        build([[(0, 0)], [], [(1, 1)]], 2, 2)[index]


@given(weighted(), st.data())
@settings(deadline=None)
def test_concat_of_pieces_is_the_whole(a: Annotations, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(a)), max_size=4)))
    ends = [0, *cuts, len(a)]
    pieces = [a[i:j] for i, j in zip(ends[:-1], ends[1:], strict=True)]
    whole = concat(pieces)
    a.item_id = torch.arange(len(a)) if a.item_id is None else a.item_id
    assert_equal(whole, a)
    if len(a):
        assert_equal(concat(list(a)), a)
    assert whole.vocabulary is a.vocabulary


@given(weighted(), st.data())
@settings(deadline=None)
def test_select(a: Annotations, data: st.DataObject) -> None:
    size = a.num_annotations
    mask = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    a.prepare()
    b = a.select(torch.tensor(mask, dtype=torch.bool))
    kept = iter(mask)
    assert to_rows(b) == [[pair for pair in row if next(kept)] for row in to_rows(a)]
    assert b.item.tolist() == [i for i, keep in zip(a.item.tolist(), mask, strict=True) if keep]
    if a.weight is not None and b.weight is not None:
        assert b.weight.tolist() == [w for w, keep in zip(a.weight.tolist(), mask, strict=True) if keep]


def test_select_wants_a_mask() -> None:
    a = build([[(0, 0)], [(1, 1)]], 2, 2)
    for mask in ([0, 1], [True], torch.ones(2)):
        with pytest.raises(ValueError, match="mask must be boolean"):
            a.select(mask)


def test_concat_refuses_what_differs() -> None:
    a, b = build([[(0, 0)]], 2, 2), build([[(0, 0)]], 3, 2)
    with pytest.raises(ValueError, match=r"pieces\[1\] has 3 annotators"):
        concat([a, b])
    with pytest.raises(ValueError, match="pieces is empty"):
        concat([])
    train = Annotations.from_long({"task": ["x"], "worker": ["u"], "label": [0]})
    other = Annotations.from_long({"task": ["y"], "worker": ["v"], "label": [0]})
    with pytest.raises(ValueError, match=r"annotator or class ids of pieces\[1\]"):
        concat([train, other])


def test_concat_of_splits_keeps_all_ids() -> None:
    fixed = {"annotators": ["u", "v"], "classes": ["no", "yes"]}
    a = Annotations.from_long({"task": ["x", "y"], "worker": ["u", "u"], "label": ["no", "yes"]}, **fixed)
    b = Annotations.from_long({"task": ["z", "x"], "worker": ["v", "u"], "label": ["yes", "no"]}, **fixed)
    both = concat([a[1], b, a[0]])
    assert both.vocabulary is not None and both.vocabulary.items == ("x", "y", "z", "x")
    assert both.to_long().values.tolist() == [
        ["y", "u", "yes"],
        ["z", "v", "yes"],
        ["x", "u", "no"],
        ["x", "u", "no"],
    ]
    assert both.item_id is not None and both.item_id.tolist() == [1, 2, 3, 0]


def test_concat_fills_absent_weights_with_one() -> None:
    a, b = build([[(0, 0)]], 1, 1, weight=[0.5]), build([[(0, 0), (0, 0)]], 1, 1)
    weight = concat([a, b]).weight
    assert weight is not None and weight.tolist() == [0.5, 1, 1]


# Legal edges


def test_small_sizes_are_not_squeezed() -> None:
    one = Annotations.from_dense([[1]], num_classes=2)
    assert one.indptr.shape == (2,) and one.to_dense().shape == (1, 1) and one.votes().shape == (1, 2)
    assert one[0].label.shape == (1,) and one[0].indptr.shape == (2,) and one[[0]].to_dense().shape == (1, 1)
    column = Annotations.from_dense(torch.tensor([[0], [-1], [1]]), num_classes=2)
    assert column.to_dense().shape == (3, 1) and column.num_annotators == 1


@pytest.mark.parametrize(
    "empty",
    [
        Annotations([0], [], [], num_annotators=3, num_classes=2),
        Annotations([0], [], [], num_annotators=3, num_classes=2, weight=[]),
        Annotations.from_dense(torch.empty(0, 3), num_classes=2),
        Annotations.from_dense(np.empty((0, 3), dtype=object), num_classes=2),
        Annotations.from_long({"task": [], "worker": [], "label": []}, annotators=3, classes=2),
        Annotations.from_long(pd.DataFrame(columns=["task", "worker", "label"]), annotators=3, classes=2),
        build([[(0, 0)], [(1, 1)]], 3, 2)[[]],
        build([[(0, 0)], [(1, 1)]], 3, 2)[1:1],
    ],
)
def test_no_items(empty: Annotations) -> None:
    assert len(empty) == empty.num_annotations == 0 and (empty.num_annotators, empty.num_classes) == (3, 2)
    assert empty.item.shape == empty.order.shape == (0,) and empty.counts.shape == (0,)
    assert empty.votes().shape == (0, 2) and empty.to_dense().shape == (0, 3) and len(empty.to_long()) == 0
    assert len(concat([empty, empty])) == 0 and len(empty[:]) == 0


def test_nothing_at_all() -> None:
    for a in (
        Annotations.from_dense([]),
        Annotations.from_long({"task": [], "worker": [], "label": []}),
        Annotations.from_long({"task": [1], "worker": ["w"], "label": [None]}),
    ):
        assert a.num_annotations == a.num_classes == 0 and a.votes().shape == (len(a), 0)


def test_items_annotators_and_classes_without_annotations() -> None:
    a = Annotations.from_dense([[0, -1, 3], [-1, -1, -1]], num_classes=5)
    assert a.counts.tolist() == [2, 0] and a.votes()[:, [1, 2, 4]].sum() == 0
    assert a[1].num_annotations == 0 and a[1].to_dense().tolist() == [[-1, -1, -1]]


def test_repeated_pair_is_kept_and_named() -> None:
    data = {"task": ["x", "y", "y", "y"], "worker": ["u", "v", "u", "v"], "label": [0, 1, 1, 0]}
    a = Annotations.from_long(data)
    assert a.to_long().to_dict("list") == data
    assert a.votes().tolist() == [[1, 0], [1, 2]]
    with pytest.raises(ValueError, match=r"item 1, annotator 1 \('y', 'v'\) has more than one label"):
        a.to_dense()
    with pytest.raises(ValueError, match=r"item 0, annotator 1 \('y', 'v'\)"):
        a[1:].to_dense()
    a = a.select(torch.tensor([True, False, True, True]))
    assert a.to_dense().tolist() == [[0, -1], [1, 0]]


# Errors


GOOD = {
    "indptr": [0, 1, 3],
    "annotator": [0, 1, 0],
    "label": [0, 1, 1],
    "num_annotators": 2,
    "num_classes": 2,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"label": [0, 1, 2]},
            r"label of annotation 2 \(item 1, annotator 0\) is 2, outside \[0, 2\).*num_classes",
        ),
        ({"label": [1, 2, 1]}, r"label of annotation 1 \(item 1, annotator 1\) is 2.*1-based: subtract 1"),
        ({"label": [0, -1, 1]}, r"label of annotation 1 \(item 1, annotator 1\) is -1.*missing"),
        (
            {"annotator": [0, -1, 0]},
            r"annotator of annotation 1 \(item 1, label 1\) is -1.*not read as the last",
        ),
        (
            {"annotator": [1, 1, 2]},
            r"annotator of annotation 2 \(item 1, label 1\) is 2.*1-based: subtract 1",
        ),
        (
            {"annotator": [0, 5, 0]},
            r"annotator of annotation 1 .* is 5, outside \[0, 2\); raise num_annotators",
        ),
        ({"indptr": [1, 1, 3]}, r"indptr\[0\] is 1"),
        ({"indptr": [0, 2, 1, 3]}, r"indptr decreases at item 1: 2 to 1"),
        ({"indptr": [0, 1, 2]}, "indptr ends at 2 and there are 3 annotations"),
        ({"indptr": []}, "indptr is empty"),
        ({"indptr": [[0, 3]]}, "indptr must have one dimension"),
        ({"label": [0, 1]}, "label has 2 entries, annotator 3"),
        ({"label": [0, 0.5, 1]}, r"label\[1\] is 0.5, no integer"),
        ({"label": torch.tensor([0, NAN, 1])}, r"label\[1\] is nan, no integer"),
        ({"label": ["0", "1", "1"]}, r"label\[0\] is '0'; integers are needed"),
        ({"label": [0, None, 1]}, r"label\[1\] is None; integers are needed"),
        ({"annotator": torch.tensor([0j, 0, 0])}, "annotator must hold integers"),
        ({"weight": [1.0, 2.0]}, r"weight must be real, \[3\]"),
        ({"weight": [1, -1, 0]}, r"weight of annotation 1 \(item 1, annotator 1\) is -1.0"),
        ({"weight": [1.0, 0.0, NAN]}, r"weight of annotation 2 .* is nan"),
        ({"weight": [1.0, float("inf"), 0]}, "weight of annotation 1 .* is inf"),
        ({"item_id": [0]}, "item_id has 1 entries for 2 items"),
        ({"item_id": [0, -1]}, "item_id of item 1 is -1"),
        ({"item_id": [0, 2], "vocabulary": Vocabulary(("a", "b"), (0, 1), (0, 1))}, "item_id of item 1 is 2"),
        ({"vocabulary": Vocabulary(("a", "b"), (0, 1), (0,))}, "vocabulary.classes has 1 ids for 2 classes"),
        ({"vocabulary": Vocabulary(("a",), (0, 1), (0, 1))}, "vocabulary.items has 1 ids for 2 items"),
        ({"num_classes": 2.0}, "num_classes must be an integer"),
        ({"num_annotators": -1}, "num_annotators must be an integer, 0 or more"),
    ],
)
def test_constructor_names_what_is_wrong(change, message) -> None:
    Annotations(**GOOD)
    with pytest.raises(ValueError, match=message):
        Annotations(**{**GOOD, **change})


def test_row_named_is_not_an_empty_one() -> None:
    with pytest.raises(ValueError, match=r"annotation 1 \(item 3, annotator 0\)"):
        build([[(0, 0)], [], [], [(0, 9)], []], 1, 2)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8, torch.float32, torch.float64])
def test_integers_of_any_dtype(dtype: torch.dtype) -> None:
    tensors = {name: torch.tensor(GOOD[name], dtype=dtype) for name in ("indptr", "annotator", "label")}
    a = Annotations(**{**GOOD, **tensors})
    assert_equal(a, Annotations(**GOOD))
    assert a.indptr.dtype == a.annotator.dtype == a.label.dtype == torch.int64


def test_as_annotations() -> None:
    a = build([[(0, 0)], [(1, 1)]], 2, 3)
    assert as_annotations(a, num_annotators=2, num_classes=3) is a
    b = as_annotations(torch.tensor([[0, -1], [-1, 1]]), num_annotators=2, num_classes=3)
    assert_equal(b, a)
    assert to_rows(as_annotations(torch.tensor([[0.0, 7]]), num_annotators=2, num_classes=3, missing=7)) == [[(0, 0)]]
    for sizes in ((3, 3), (2, 2)):
        with pytest.raises(ValueError, match="annotations have 2 annotators and 3 classes, expected"):
            as_annotations(a, num_annotators=sizes[0], num_classes=sizes[1])
    for bad in (torch.zeros(4), torch.zeros(4, 3), [[0, 1]]):
        with pytest.raises(ValueError, match=r"targets must be Annotations or a tensor \[B, 2\]"):
            as_annotations(bad, num_annotators=2, num_classes=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="row 1, column 0 .* is 3"):
        as_annotations(torch.tensor([[0, -1], [3, 1]]), num_annotators=2, num_classes=3)
