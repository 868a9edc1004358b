"""The simulated annotators of CCC: what each pattern does, who is selected, draws that repeat."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_close

from crowdnal.metrics import empirical_confusion
from crowdnal.simulation import SETTINGS, sparse_crowd

TRUTH = torch.arange(4000) % 10


@pytest.mark.parametrize("setting", SETTINGS)
def test_annotators_do_what_their_confusions_say(setting):
    crowd = sparse_crowd(TRUTH, setting, num_annotators=20, annotations_per_item=20, seed=3)
    assert crowd.confusions.shape == (20, 10, 10)
    assert_close(crowd.confusions.sum(-1), torch.ones(20, 10))
    found = empirical_confusion(torch.eye(10)[TRUTH], crowd.annotations)
    assert (found - crowd.confusions).abs().max() < 0.12  # 400 items of a class
    assert (found - crowd.confusions).abs().mean() < 0.012
    labels = crowd.annotations.to_dense()
    right = labels == TRUTH[:, None]
    for r, other in enumerate(crowd.looks_at.tolist()):
        kind = SETTINGS[setting][r // 4][0]
        assert (other >= 0) == (kind in ("copy", "supp", "oppo")) and other < r // 4 * 4
        if kind == "copy":
            assert torch.equal(labels[:, r], labels[:, other])
        elif kind in ("supp", "oppo"):
            where = right[:, other] if kind == "supp" else ~right[:, other]
            assert right[where, r].all()
            if (~where).sum() > 400:
                assert abs(right[~where, r].double().mean() - 0.1) < 0.06


def test_patterns_of_the_independent():
    sym, _, pair, named, dummy = sparse_crowd(TRUTH, "IND-I", num_annotators=5).confusions
    assert sym.diagonal().tolist() == pytest.approx([0.7] * 10) and sym[0, 5] == pytest.approx(0.3 / 9)
    assert pair[9, 0] == pytest.approx(0.6) and pair[3, 4] == pytest.approx(0.6) and pair[3, 5] == 0
    assert [k for k in range(10) if named[k, k] == 1] == [1, 3, 4, 6, 8]
    assert named[0].tolist() == dummy[1].tolist() == pytest.approx([0.1] * 10)


@pytest.mark.parametrize("setting", ["IND-I", "COR-II"])
def test_few_are_selected_with_odds_of_their_own(setting):
    crowd = sparse_crowd(TRUTH, setting, num_annotators=50, annotations_per_item=5, seed=0)
    a = crowd.annotations
    assert a.counts.unique().tolist() == [5]
    given = a.annotator.bincount(minlength=50)
    assert given.max() > 5 * given.min()  # a few annotators give few labels
    again = sparse_crowd(TRUTH, setting, num_annotators=50, annotations_per_item=5, seed=0)
    assert torch.equal(again.annotations.label, a.label) and torch.equal(again.annotations.annotator, a.annotator)
    other = sparse_crowd(TRUTH, setting, num_annotators=50, annotations_per_item=5, seed=1)
    assert not torch.equal(other.annotations.annotator, a.annotator)
    everyone = sparse_crowd(TRUTH[:100], setting)
    assert everyone.annotations.num_annotators == 250 and everyone.annotations.counts.unique().tolist() == [3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"setting": "IND-V"}, "setting='IND-V' is unknown: use one of IND-I, IND-II"),
        ({"num_annotators": 12}, "num_annotators=12 must be a multiple of 5"),
        ({"num_annotators": 0}, "num_annotators=0"),
        ({"setting": "COR-I", "num_classes": 9}, "num_classes=9 must be 10 or more for COR-I"),
        ({"annotations_per_item": 251}, "annotations_per_item"),
        ({"truth": [0, 10]}, r"truth\[1\]"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        sparse_crowd(**{"truth": [0, 1], "setting": "IND-I", **options})
