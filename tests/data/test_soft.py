"""Arrays [N, R, K] of probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from crowdnal.data import Annotations

SOFT = torch.tensor(
    [[[0.2, 0.8, 0.0], [-1, -1, -1]], [[torch.nan] * 3, [0.0, 0.0, 1.0]], [[0.0, 0.0, 0.0], [-1, -1, -1]]]
)


def test_each_probability_above_0_is_a_label() -> None:
    for given in (SOFT, SOFT.numpy(), SOFT.double(), np.ma.masked_array(SOFT.numpy(), SOFT.isnan().numpy())):
        a = Annotations.from_dense(given)
        assert (a.num_items, a.num_annotators, a.num_classes, a.item_id, a.vocabulary) == (3, 2, 3, None, None)
        assert a.indptr.tolist() == [0, 2, 3, 3] and a.annotator.tolist() == [0, 0, 1] and a.label.tolist() == [0, 1, 2]
        assert a.weight is not None and a.weight.tolist() == pytest.approx([0.2, 0.8, 1.0])
    assert Annotations.from_dense(SOFT.double()).weight.dtype == torch.float64
    certain = torch.tensor([[[0, 1], [1, 0]]])
    assert Annotations.from_dense(certain).weight.tolist() == [1.0, 1.0]
    assert len(Annotations.from_dense(torch.zeros(0, 2, 3))) == 0
    assert torch.equal(Annotations.from_dense(SOFT.tolist()).votes(), Annotations.from_dense(SOFT).votes())
    pairs = Annotations.from_dense([[("a", "b"), ("c", "d")]])  # labels may be tuples
    assert pairs.weight is None and pairs.num_classes == 2


def test_ids() -> None:
    a = Annotations.from_dense(SOFT, items=["x", "y", "z"], annotators=["ann", "bob"], classes=["cat", "dog", "owl"])
    assert a.vocabulary is not None and a.vocabulary.classes == ("cat", "dog", "owl")
    assert a.item_id is not None and a.item_id.tolist() == [0, 1, 2]
    table = a.to_long()
    assert table["worker"].tolist() == ["ann", "ann", "bob"] and table["label"].tolist() == ["cat", "dog", "owl"]
    again = Annotations.from_long(table, weight="weight", items=["x", "y", "z"], classes=["cat", "dog", "owl"])
    assert torch.equal(again.votes(), a.votes())
    assert torch.equal(Annotations.from_dense(SOFT, num_classes=3, missing=-1).votes(), a.votes())


def test_another_mark_of_what_is_missing() -> None:
    a = Annotations.from_dense(torch.tensor([[[9.0, 9.0], [0.5, 0.5]]]), missing=9)
    assert a.annotator.tolist() == [1, 1]


def test_what_is_no_distribution_is_named() -> None:
    for wrong, cell in ((2 * SOFT, r"\[0, 0, 1\] is 1.6"), (SOFT.where(SOFT != 0.2, -0.5), r"\[0, 0, 0\] is -0.5")):
        with pytest.raises(ValueError, match=f"matrix{cell}: probabilities are numbers from 0 to 1"):
            Annotations.from_dense(wrong)
    half = SOFT.clone()
    half[1, 1, 0] = torch.nan
    with pytest.raises(ValueError, match=r"matrix\[1, 1, 0\] is nan"):
        Annotations.from_dense(half)
    with pytest.raises(ValueError, match=r"matrix is \[3, 2, 3\], 3 probabilities an answer, but there are 4 classes"):
        Annotations.from_dense(SOFT, num_classes=4)
    with pytest.raises(ValueError, match="there are 2 classes"):
        Annotations.from_dense(SOFT, classes=["a", "b"])
    with pytest.raises(ValueError, match="items has 2 ids for 3 rows"):
        Annotations.from_dense(SOFT, items=["a", "b"])
    with pytest.raises(ValueError):
        Annotations.from_dense([[[0.5, 0.5], [1.0]]])
    with pytest.raises(ValueError, match="complex"):
        Annotations.from_dense(torch.zeros(1, 1, 2, dtype=torch.complex64))
