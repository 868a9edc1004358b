"""What a summary says, against other libraries, by hand, and on crowds in which the odd annotators are known."""

from __future__ import annotations

import json
import sys
import time

import krippendorff
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.stats.inter_rater import fleiss_kappa

import crowdnal
from crowdnal import Annotations, simulation
from crowdnal.objectives import OBJECTIVES


def test_by_hand() -> None:
    a = Annotations.from_long(
        {
            "task": ["a", "a", "a", "b", "b", "c", "c", "d", "e", "e", "f"],
            "worker": ["u", "v", "u", "u", "v", "u", "v", "x", "x", "y", "z"],
            "label": ["p", "p", "q", "p", "q", "q", "q", "p", "p", "q", None],
        },
        classes=["p", "q", "r"],
    )
    s = a.summary()
    assert (s.items, s.annotated, s.annotators, s.active, s.annotations) == (6, 5, 5, 4, 10)
    assert s.repeated == 1 and s.classes == {"p": 5, "q": 5, "r": 0} and not s.weighted
    assert s.labels_per_item == (1, 2, 2, 3) and s.labels_per_annotator == (1, 2.5, 2.5, 4)
    assert s.items_by_labels == {0: 1, 1: 1, 2: 3, 3: 1} and s.annotators_by_labels == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}
    assert (s.shared, s.unanimous, s.tied) == (4, 1, 2)
    assert s.disputed == ["b", "e"] and s.num_disputed == 2 and s.groups == [2, 2]
    assert s.agreement.kappa_items == 3 and s.agreement.kappa_labels == 2
    found = json.loads(json.dumps(s.to_dict()))
    assert found["disputed"] == ["b", "e"] and found["classes"]["r"] == 0 and found["agreement"]["alpha_items"] == 4


@given(st.integers(2, 5), st.integers(2, 12), st.integers(0, 10**6))
@settings(deadline=None, max_examples=50)
def test_agreement_is_that_of_the_libraries(classes: int, items: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    dense = generator.integers(-1, classes, (items, 4))
    found = Annotations.from_dense(dense, num_classes=classes).summary().agreement
    data = np.where(dense < 0, np.nan, dense)
    shared = dense[(dense >= 0).sum(1) > 1]
    used = np.unique(shared[shared >= 0])
    if len(used) < 2:
        assert found.alpha is None
    else:
        expected = krippendorff.alpha(data[(dense >= 0).sum(1) > 1].T, level_of_measurement="nominal")
        assert found.alpha == pytest.approx(expected, nan_ok=True)
        if len(used) > 2:
            expected = krippendorff.alpha(data[(dense >= 0).sum(1) > 1].T, level_of_measurement="ordinal")
            assert found.ordinal_alpha == pytest.approx(expected)
    full = generator.integers(0, classes, (items, 3))
    table = np.stack([(full == k).sum(1) for k in range(classes)], 1)
    if len(np.unique(full)) > 1:
        found = Annotations.from_dense(full, num_classes=classes).summary().agreement
        assert found.kappa == pytest.approx(fleiss_kappa(table)) and found.kappa_items == items


def crowd(seed: int = 0, odd: bool = True) -> tuple[Annotations, list[int]]:
    """400 items, 5 labels each by 20 annotators: 3 at random, 2 always the same, 2 pairs of copies, if any is odd."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(4, (400,), generator=generator)
    dense = simulation.simulate(
        truth, simulation.symmetric_confusions(20, 4, 0.75), annotations_per_item=20, seed=seed
    ).to_dense()
    if odd:
        for r in (0, 1, 2):
            dense[:, r] = torch.randint(4, (400,), generator=generator)
        dense[:, 3], dense[:, 4] = 1, 2
        dense[:, 6], dense[:, 8] = dense[:, 5], dense[:, 7]
        dense[:10, 8] = (dense[:10, 8] + 1) % 4  # not quite a copy
    keep = torch.rand(400, 20, generator=generator).argsort(1) < 8
    keep[:, 5:9] |= keep[:, 5:6]
    return Annotations.from_dense(torch.where(keep, dense, -1), num_classes=4), truth.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_odd_annotators_are_found_and_no_others(seed: int) -> None:
    found = crowd(seed)[0].summary().suspects
    assert sorted(found.random) == [0, 1, 2] and sorted(found.constant) == [3, 4]
    assert sorted(found.copies) == [(5, 6), (7, 8)]
    assert crowd(seed, odd=False)[0].summary().suspects == ([], [], [])


def test_careful_annotators_of_easy_items_copy_nobody() -> None:
    truth = torch.arange(300) % 3
    a = simulation.simulate(truth, simulation.symmetric_confusions(10, 3, 0.98), annotations_per_item=5, seed=0)
    assert a.summary().suspects == ([], [], [])
    always = Annotations.from_dense(torch.zeros(50, 4, dtype=torch.int64), num_classes=2)  # everybody is right
    assert always.summary().suspects.constant == []


def test_advice_names_methods_that_exist_and_fits_the_data() -> None:
    def advice(dense: torch.Tensor, classes: int = 3) -> list:
        return Annotations.from_dense(dense, num_classes=classes).summary().advice

    generator = torch.Generator().manual_seed(0)
    once = torch.full((90, 90), -1).diagonal_scatter(torch.randint(3, (90,), generator=generator))
    many = torch.randint(3, (200, 5), generator=generator)
    blocks = torch.full((60, 4), -1)
    blocks[:30, :2], blocks[30:, 2:] = many[:30, :2], many[30:60, 2:4]
    said = {name: advice(dense) for name, dense in {"once": once, "many": many, "blocks": blocks}.items()}
    said["one annotator"] = advice(many[:, :1])
    known = {*OBJECTIVES, *crowdnal.aggregation.__all__}
    for sentences in said.values():
        assert sentences and {m for one in sentences for m in (*one.suits, *one.does_not_suit)} <= known
    assert "crowd-layer" in said["once"][0].does_not_suit and "cmm" in said["once"][0].suits
    assert any("one label" in one.text for one in said["once"])
    assert "crowd-layer" in said["many"][0].suits and any("better than chance" in one.text for one in said["many"])
    assert any("2 groups that share no item" in one.text for one in said["blocks"])
    assert "One annotator" in said["one annotator"][0].text


def test_nothing_to_sum_up() -> None:
    for a in (Annotations.from_dense(torch.full((3, 2), -1), num_classes=2),
              Annotations.from_long({"task": [], "worker": [], "label": []})):  # fmt: skip
        s = a.summary()
        assert s.annotations == 0 and s.agreement.alpha is None and s.groups == [] and "no labels" in s.advice[0].text


def test_libraries_are_named_by_their_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "krippendorff", None)
    with pytest.raises(ImportError, match=r"pip install \"crowdnal\[agreement\]\""):
        crowd()[0].summary()


@pytest.mark.slow
def test_a_million_annotations_are_quick() -> None:
    confusions = simulation.hammer_spammer_confusions(2000, 10, hammers=0.8)
    a = simulation.simulate(torch.arange(200_000) % 10, confusions, annotations_per_item=5, seed=0)
    start = time.perf_counter()
    found = a.summary()
    assert time.perf_counter() - start < 20
    spammers = {r for r in range(2000) if float(confusions[r].diagonal().mean()) < 0.2}
    assert set(found.suspects.random) == spammers and found.agreement.alpha_items == 50_000
