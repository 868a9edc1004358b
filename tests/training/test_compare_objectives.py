"""`compare`: objectives by labels of items that their heads have not seen."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import crowdnal
from crowdnal import Annotations, compare, metrics, simulation
from crowdnal.training import CANDIDATES, VOTES, _compare


def crowd(kind: str, items: int = 240, seed: int = 0) -> tuple[Tensor, Annotations, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(0, 3, (items,), generator=generator)
    x = 2 * torch.eye(3, 8)[truth] + torch.randn(items, 8, generator=generator)
    rates = torch.full((12,), 0.8)
    confusions = simulation.symmetric_confusions(12, 3, rates)
    if kind == "adversaries":
        confusions[:5] = simulation.symmetric_confusions(5, 3, 0.05)
    annotations = simulation.simulate(truth, confusions, annotations_per_item=3, seed=seed)
    return x, annotations, truth


def test_a_method_that_sees_through_adversaries_is_taken():
    x, annotations, truth = crowd("adversaries", items=400)
    found = compare(x, annotations, ["dl-ds"], epochs=10, lr=0.02)
    assert list(found.log_likelihood) == [VOTES, "dl-ds"]
    assert found.method == "dl-ds" and found.standard_errors["dl-ds"] > 2 and found.standard_errors[VOTES] == 0
    right = {name: metrics.accuracy(q, truth) for name, q in found.posterior.items()}
    assert right["dl-ds"] > right[VOTES] + 0.02
    assert str(found).splitlines()[-1] == f"dl-ds: {found.why}"
    for q in found.posterior.values():
        assert q.shape == (400, 3) and torch.allclose(q.sum(1), torch.ones(400).double())


def test_the_votes_are_taken_where_nothing_is_better():
    x, annotations, _ = crowd("even")
    found = compare(x, annotations, ["soft-majority-vote", "crowd-layer"], epochs=5, margin=50.0)
    assert found.method == VOTES and "votes" in found.why


def test_no_head_sees_a_label_or_a_gold_class_of_its_fold(monkeypatch):
    x, annotations, truth = crowd("even", items=40)
    seen: list[Tensor] = []

    class Spy(crowdnal.MajorityVote):
        def loss(self, logits, a, features=None, **more):
            seen.append(a.item_id[a.counts > 0])
            return super().loss(logits, a, features, **more)

        def set_gold(self, gold, annotations=None):
            assert bool((gold[held] < 0).all()) and bool((gold[~held] == known[~held]).all())
            super().set_gold(gold, annotations)

    monkeypatch.setattr(_compare, "create", lambda name, **sizes: Spy(**sizes))
    real = _compare._Run._trained
    held = torch.zeros(40, dtype=torch.bool)

    def trained(run, name, options, fold):
        nonlocal held
        held = fold
        seen.clear()
        found = real(run, name, options, fold)
        assert len(seen) > 0 and not bool(fold[torch.cat(seen)].any())
        return found

    monkeypatch.setattr(_compare._Run, "_trained", trained)
    known = truth.where(torch.arange(40) % 4 == 0, -1)
    compare(x, annotations, [], folds=2, epochs=1, gold=known)
    assert bool(held.any())


def test_a_label_is_foreseen_as_by_hand():
    """Two folds, one annotator: the confusion counted on the other fold, with the crowd's (the same) as a prior."""
    annotations = Annotations.from_dense([[0], [0], [1], [1], [1], [0]], num_classes=2)
    posterior = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.1, 0.9], [0.6, 0.4], [0.5, 0.5]]).double()
    fold = torch.tensor([0, 0, 0, 1, 1, 1])
    run = _compare._Run(torch.zeros(6, 1), annotations, 2, nn.Identity, None, fold, 1, 1, 0.1, None, 0)
    found = run._foreseen(posterior)
    label = [0, 0, 1, 1, 1, 0]
    for i in range(6):
        others = [n for n in range(6) if fold[n] != fold[i]]
        counts = [[sum(float(posterior[n, k]) for n in others if label[n] == y) for y in (0, 1)] for k in (0, 1)]
        crowd = [[(c + (k == y)) / (sum(row) + 1) for y, c in enumerate(row)] for k, row in enumerate(counts)]
        strength = crowdnal.aggregation.em.crowd_strength(
            torch.tensor(counts).double().t().unsqueeze(0), torch.tensor(crowd).double()
        )
        given = [
            [(counts[k][y] + strength * crowd[k][y]) / (sum(counts[k]) + strength) for y in (0, 1)] for k in (0, 1)
        ]
        expected = math.log(sum(float(posterior[i, k]) * given[k][label[i]] for k in (0, 1)))
        assert float(found[i]) == pytest.approx(expected, rel=1e-6)


def test_how_sharp_predictions_are_makes_no_difference():
    x, annotations, truth = crowd("even")
    run = _compare._Run(x, annotations, 3, nn.Identity, None, torch.arange(240) % 5, 1, 1, 0.1, None, 0)
    soft = (torch.eye(3)[truth].double() + 0.1).log_softmax(1)
    one, other = (run.foreseen((power * soft).softmax(1)).mean() for power in (1.0, 2.0))
    assert float(one) == pytest.approx(float(other), abs=0.01)


def test_equal_seeds_give_equal_numbers_and_leave_the_generator_alone():
    x, annotations, _ = crowd("even", items=60)
    state = torch.get_rng_state()
    one, other = (compare(x, annotations, epochs=2) for _ in range(2))
    assert one.log_likelihood == other.log_likelihood and set(one.log_likelihood) == set(CANDIDATES)
    assert torch.equal(state, torch.get_rng_state())


def test_unsure_answers_options_and_a_head_of_ones_own():
    x, annotations, _ = crowd("even", items=60)
    dense = annotations.to_dense()
    dense[dense[:, 0] >= 0, 0] = 3  # "unsure", a fourth label
    wide = Annotations.from_dense(dense, num_classes=4)
    told: list[str] = []
    found = compare(
        x, wide, ["crowd-layer"], num_classes=3, head=lambda: nn.Linear(8, 3), epochs=2, progress=told.append,
        options={"crowd-layer": {"reduction": "item_mean"}},
    )  # fmt: skip
    assert told == [VOTES, "crowd-layer"] and found.posterior[VOTES].shape == (60, 3)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"features": torch.zeros(5, 2)}, r"features is torch.float32 \[5, 2\]"),
        ({"features": torch.zeros(60, 8, dtype=torch.long)}, "features is torch.int64"),
        ({"features": torch.full((60, 8), torch.nan)}, r"features\[0\] is not finite"),
        ({"folds": 1}, "folds"),
        ({"folds": 60}, "60 items with labels, too few for folds=60"),
        ({"epochs": 0}, "epochs"),
        ({"lr": -1.0}, "lr"),
        ({"methods": ["nobody"]}, "'nobody' is unknown"),
        ({"options": {VOTES: {"colour": 1}}}, "no option 'colour'"),
    ],
)
def test_what_cannot_be_compared_is_named_before_anything_is_trained(changes, wrong, monkeypatch):
    monkeypatch.setattr(_compare._Run, "_trained", lambda *_: pytest.fail("trained"))
    x, annotations, _ = crowd("even", items=60)
    with pytest.raises(ValueError, match=wrong):
        compare(**({"features": x, "annotations": annotations, "methods": [], "epochs": 1} | changes))
