"""Known labels of every kind, in aggregation and in objectives."""

from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from support.crowds import NAN

import crowdnal
from crowdnal.data import Annotations, as_gold

A = Annotations.from_long(
    {"task": [5, 3, 5, 9], "worker": ["u", "u", "v", "v"], "label": ["no", "yes", "yes", "no"]}
)  # items 5, 3, 9; classes no, yes


@pytest.mark.parametrize(
    "gold",
    [
        torch.tensor([1, -1, 0]),
        torch.tensor([1, -1, 0], dtype=torch.int8),
        torch.tensor([1.0, NAN, 0]),
        np.array([1, -1, 0]),
        np.array([1, NAN, 0]),
        np.ma.array([1, 1, 0], mask=[False, True, False]),
        [1, -1, 0],
        [1, None, 0],
        ["yes", None, "no"],
        np.array(["yes", None, "no"], dtype=object),
        pd.Series([1, NAN, 0]),
        pd.Series([1, None, 0], dtype="Int64"),
        pl.Series([1, None, 0]),
        pd.Series(["yes", None, "no"]),
        pd.Series(["no", "yes"], index=[9, 5]),  # by item id
        pd.Series(["no", None, "yes"], index=[9, 3, 5]),
        {5: "yes", 9: "no"},
        {5: "yes", 3: -1, 9: "no"},
        {5: "yes", 3: None, 9: "no"},
    ],
)
def test_gold_of_every_kind(gold) -> None:
    known = as_gold(gold, A)
    assert known.dtype == torch.int64 and known.tolist() == [1, -1, 0]
    for method in (crowdnal.dawid_skene, crowdnal.one_coin, crowdnal.mmce, crowdnal.worker_clustering):
        options = {"num_clusters": 1} if method is crowdnal.worker_clustering else {}
        with_gold = method(A, gold=gold, **options)
        assert torch.equal(with_gold.posterior, method(A, gold=torch.tensor([1, -1, 0]), **options).posterior)
        assert with_gold.labels[[0, 2]].tolist() == [1, 0]


def test_gold_goes_by_item_in_part_of_a_data_set() -> None:
    assert as_gold({9: "yes"}, A[[2, 1]]).tolist() == [1, -1]
    plain = Annotations([0, 1, 2], [0, 0], [0, 2], num_annotators=1, num_classes=3)
    assert as_gold({1: 2}, plain).tolist() == [-1, 2] and as_gold({1: 0}, plain[1:]).tolist() == [0]
    numbered = Annotations.from_long({"task": [0, 2, 1], "worker": [0] * 3, "label": [3, 4, 5]})
    assert as_gold({2: 5, 0: 3}, numbered).tolist() == [0, 2, -1]
    assert as_gold(pd.Series([3, 4, 5]), numbered).tolist() == [0, 2, 1]  # its index are item ids: 0, 1, 2


def test_objectives_take_gold_by_position() -> None:
    for gold in (np.array([1, -1, 0]), [1, None, 0], pd.Series([1, NAN, 0])):
        assert crowdnal.DLEM(2, 2, gold=gold).gold.tolist() == [1, -1, 0]
    with pytest.raises(ValueError, match="gold by item id needs the annotations"):
        crowdnal.DLEM(2, 2, gold={5: 1})


@pytest.mark.parametrize(
    ("gold", "words"),
    [
        ([1, 0], r"gold must be \[N\] integers for N = 3 items, got \[2\]"),
        (torch.zeros(3, 2, dtype=torch.int64), r"gold must be \[N\] integers, got \[3, 2\]"),
        ([1, 2, 0], r"gold\[1\] is 2, outside \[0, 2\); mark unknown classes with -1"),
        (torch.tensor([1, 2, 0]), r"gold\[1\] is 2, outside \[0, 2\)"),
        ([1, 0.5, 0], r"gold\[1\] is 0.5, outside \[0, 2\)"),
        (["yes", "maybe", "no"], r"gold\[1\]: 'maybe' is not in classes"),
        ({5: "yes", 9: "maybe"}, r"gold\[9\]: 'maybe' is not in classes"),
        ({"5": "yes"}, r"gold\['5'\]: there is no such item, only 5, \.\.\.; leave it out"),
        (3, "gold is int, not a list"),
    ],
)
def test_gold_that_does_not_fit_is_named(gold, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        as_gold(gold, A)
