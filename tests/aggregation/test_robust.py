"""Never below the votes: the crowd's prior, Bayesian combination, the choice among methods, EM on features."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from support.compare import assert_close
from support.crowds import simulated, weighted
from torch import Tensor

import crowdnal
from crowdnal import (
    Annotations,
    aggregate,
    bwa,
    cbcc,
    dawid_skene,
    ebcc,
    feature_em,
    ibcc,
    metrics,
    one_coin,
    simulation,
)
from crowdnal.aggregation import CANDIDATES, choose, vote_proportions
from crowdnal.aggregation.em import STRENGTHS, crowd_confusion, crowd_strength


def crowd(
    accuracy: tuple[float, float], classes: int, items: int, annotators: int, per_item: int, seed: int
) -> tuple[Annotations, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(classes, (items,), generator=generator)
    rates = accuracy[0] + (accuracy[1] - accuracy[0]) * torch.rand(annotators, generator=generator)
    confusions = simulation.symmetric_confusions(annotators, classes, rates)
    return simulation.simulate(truth, confusions, annotations_per_item=per_item, seed=seed), truth


def ahead(posterior: Tensor, a: Annotations, truth: Tensor) -> float:
    return metrics.accuracy(posterior, truth) - metrics.accuracy(vote_proportions(a, a.num_classes), truth)


def test_everybody_labels_once() -> None:
    """Case A23: the paper's Dawid-Skene makes every item one class; the default keeps the votes."""
    truth = torch.arange(60) % 2
    generator = torch.Generator().manual_seed(3)
    label = torch.where(
        torch.rand(180, generator=generator) < 0.9, truth.repeat_interleave(3), 1 - truth.repeat_interleave(3)
    )
    a = Annotations(torch.arange(0, 181, 3), torch.arange(180), label, num_annotators=180, num_classes=2)
    voted = metrics.accuracy(a.votes(), truth)
    assert voted > 0.9
    assert metrics.accuracy(dawid_skene(a, confusion_prior=None).posterior, truth) < 0.7
    for found in (dawid_skene(a), one_coin(a), ibcc(a), bwa(a), choose(a)):
        assert metrics.accuracy(found.posterior, truth) >= voted - 0.02
    objective = crowdnal.DLDS(2, 180)
    objective.on_train_start(a)
    assert metrics.accuracy(objective.targets, truth) >= voted - 0.02


@pytest.mark.parametrize("shape", [(300, 900, 3), (300, 60, 3), (600, 30, 5)], ids=str)
def test_hard_crowds_stay_at_the_votes(shape: tuple[int, int, int]) -> None:
    """Near chance, where maximum likelihood loses up to a third."""
    items, annotators, per_item = shape
    ours, paper = [], []
    for seed in range(3):
        a, truth = crowd((0.4, 0.7), 5, items, annotators, per_item, seed)
        ours.append(ahead(dawid_skene(a).posterior, a, truth))
        paper.append(ahead(dawid_skene(a, confusion_prior=None).posterior, a, truth))
    assert sum(ours) / 3 > -0.02 and sum(paper) / 3 < -0.05


def test_good_and_bad_annotators_are_told_apart() -> None:
    a, truth = crowd((0.3, 0.99), 4, 500, 25, 5, seed=1)
    for name in ("auto", "dawid-skene", "one-coin", "ibcc", "ebcc", "cbcc"):
        assert ahead(aggregate(a, name), a, truth) > 0.02, name


def test_the_strength_follows_how_much_annotators_differ() -> None:
    same, _ = crowd((0.7, 0.7), 3, 600, 20, 5, seed=0)
    differ, _ = crowd((0.05, 0.95), 3, 600, 20, 5, seed=0)
    strengths = []
    for a in (same, differ):
        prior = dawid_skene(a).pseudo_counts
        assert prior is not None
        strengths.append(float(prior.sum(1)[0]))
        counts = crowdnal.functional.label_counts(dawid_skene(a).posterior, a)
        assert crowd_strength(counts, prior / prior.sum(1, keepdim=True)) in STRENGTHS
    assert strengths[0] == pytest.approx(STRENGTHS[-1]) and strengths[1] <= 8


def test_a_number_of_labels_is_the_crowds_confusion_so_often() -> None:
    a, _, _ = simulated(3, 10, 200)
    mean = crowd_confusion(vote_proportions(a, 3), a, None)
    assert mean is not None
    number = dawid_skene(a, confusion_prior=7.0)
    assert number.pseudo_counts is not None
    assert_close(number.pseudo_counts, 7 * mean)
    assert_close(number.posterior, dawid_skene(a, confusion_prior=7 * mean).posterior)
    assert dawid_skene(a, confusion_prior=0.0).pseudo_counts is None
    single = Annotations([0, 1, 2], [0, 1], [0, 1], num_annotators=2, num_classes=2)
    assert crowd_confusion(vote_proportions(single, 2), single, None) is None  # one label agrees with itself
    for wrong in (-1.0, float("nan"), "votes"):
        with pytest.raises(ValueError, match="confusion_prior="):
            dawid_skene(a, confusion_prior=wrong)  # type: ignore[arg-type]


@settings(max_examples=15, deadline=None)
@given(a=weighted())
def test_bayesian_combination_on_any_crowd(a: Annotations) -> None:
    for found in (
        ibcc(a, max_iterations=15),
        ebcc(a, subtypes=3, restarts=2, max_iterations=15),
        cbcc(a, 2, max_iterations=15, tolerance=-1),
        cbcc(a, max_iterations=15, strength=2.5, prior_labels=3.0, tolerance=-1),
    ):
        assert_close(found.posterior.sum(1), torch.ones(len(a)).double())
        assert_close(found.confusion.sum(2), torch.ones(found.confusion.shape[:2]).double())
        assert_close(found.class_prior.sum(), torch.tensor(1.0).double())
        steps = torch.tensor(found.lower_bound).double().diff()
        assert bool((steps > -1e-8 * (1 + abs(found.lower_bound[0]))).all()), found.lower_bound
    weighed = bwa(a)
    assert_close(weighed.posterior.sum(1), torch.ones(len(a)).double())
    assert bool((weighed.precision > 0).all())


def test_ibcc_is_ebcc_with_one_kind_of_items_and_the_priors_mean_where_nothing_is_known() -> None:
    a, truth, _ = simulated(3, 10, 200)
    one, other = ibcc(a), ebcc(a, subtypes=1, subtype_strength=1.0)
    assert torch.equal(one.posterior, other.posterior) and one.lower_bound == other.lower_bound
    assert metrics.accuracy(one.posterior, truth) > 0.8
    wide = Annotations(a.indptr, a.annotator, a.label, num_annotators=12, num_classes=3)
    assert_close(ibcc(wide).confusion[11], (torch.eye(3) * 3 + 1).double() / 6)
    with pytest.raises(ValueError, match="diagonal=0"):
        ibcc(a, diagonal=0)
    with pytest.raises(ValueError, match="restarts=0 must be a positive integer"):
        ebcc(a, restarts=0)


def test_ebcc_knows_annotators_who_copy() -> None:
    """Nine copies of one wrong opinion outvote five independent annotators; kinds of items explain them."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(2, (400,), generator=generator)
    opinion = torch.where(torch.rand(400, generator=generator) < 0.6, truth, 1 - truth)
    own = [torch.where(torch.rand(400, generator=generator) < 0.85, truth, 1 - truth) for _ in range(5)]
    a = Annotations.from_dense(torch.stack([*own, *[opinion] * 9], 1), num_classes=2)
    posterior = ebcc(a, subtypes=4).posterior
    assert torch.equal(posterior, ebcc(a, subtypes=4).posterior)  # repeatable
    assert metrics.accuracy(posterior, truth) >= metrics.accuracy(ibcc(a).posterior, truth) - 0.01


def test_cbcc_finds_communities_and_what_they_do() -> None:
    """Half the annotators name the next class, with few labels each: the community tells, not their own few."""
    generator = torch.Generator().manual_seed(2)
    truth = torch.randint(3, (300,), generator=generator)
    good = simulation.symmetric_confusions(100, 3, 0.85)
    confusions = torch.cat([good[:60], good[60:].roll(1, 2)])
    a = simulation.simulate(truth, confusions, annotations_per_item=5, seed=1)
    found = cbcc(a, 2, prior_labels=2.0)
    first, second = found.membership[:60].mean(0), found.membership[60:].mean(0)
    one = int(first.argmax())
    assert float(first[one]) > 0.9 and float(second[1 - one]) > 0.9
    assert_close(found.communities[one], good[0].double(), atol=0.1)
    assert_close(found.communities[1 - one], good[0].roll(1, 1).double(), atol=0.1)
    assert metrics.accuracy(found.posterior, truth) > metrics.accuracy(ibcc(a).posterior, truth)
    assert torch.equal(found.posterior, cbcc(a, 2, prior_labels=2.0).posterior)
    assert torch.equal(aggregate(a, "cbcc", num_communities=2, prior_labels=2.0), found.posterior)


def test_cbcc_bound_by_hand() -> None:
    """One annotator, one community, s given: the evidence of a Dirichlet-multinomial, by lgamma."""
    a = Annotations.from_dense(torch.tensor([[0, 0], [1, 1], [0, 0]]), num_classes=2)
    found = cbcc(a, 1, strength=4.0, max_iterations=1)
    votes, prior = a.votes().double(), found.communities[0] * 4
    counts = torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double()  # of each of the two annotators
    expected = ((prior + counts) / (prior + counts).sum(1, keepdim=True)).expand(2, 2, 2)
    assert_close(found.confusion, expected)
    of_class = 1 + votes.sum(0) / votes.sum(1).mean()
    assert_close(found.class_prior, of_class / of_class.sum())
    log = (prior + counts).digamma() - (prior + counts).sum(1, keepdim=True).digamma()
    log_prior = of_class.digamma() - of_class.sum().digamma()
    joint = log_prior + 2 * log.t()[torch.tensor([0, 1, 0])]
    evidence = (prior + counts).lgamma().sum() - prior.lgamma().sum() - ((prior + counts).sum(1).lgamma()).sum()
    evidence = evidence + prior.sum(1).lgamma().sum() - (counts * log).sum()
    kl = torch.distributions.kl_divergence(
        torch.distributions.Dirichlet(of_class), torch.distributions.Dirichlet(torch.ones(2).double())
    )
    crowd = crowd_confusion(vote_proportions(a, 2), a, None)
    assert crowd is not None
    crowd = 200 * crowd
    bound = joint.logsumexp(1).sum() + 2 * evidence - kl + (crowd * found.communities[0].log()).sum()
    assert_close(torch.tensor(found.lower_bound[0]).double(), bound)


def test_bwa_by_hand() -> None:
    a = Annotations([0, 2, 3], [0, 1, 0], [0, 1, 1], num_annotators=2, num_classes=2)
    z = torch.tensor([[0.5, 0.5], [0.0, 1.0]]).double()
    spread = (2 * 0.25 * 2) / 3
    wrong = torch.tensor([0.5 + 0, 0.5]).double()
    precision = (15 + torch.tensor([2.0, 1.0]).double()) / (15 * spread + wrong)
    votes = torch.stack([precision, torch.tensor([0, precision[0]]).double()])
    votes[0] = precision
    moved = z.mean(0) + votes
    found = bwa(a, max_iterations=1)
    assert_close(found.precision, precision)
    assert_close(found.posterior, moved / moved.sum(1, keepdim=True))


def test_the_choice_is_the_votes_unless_a_model_foresees_more() -> None:
    a, _ = crowd((0.7, 0.7), 2, 150, 450, 3, seed=0)  # one label each: there is nobody to know
    found = choose(a)
    assert set(found.log_likelihood) == set(CANDIDATES)
    assert found.method in CANDIDATES and (found.method == "majority-vote" or found.method in found.why)
    b, truth = crowd((0.3, 0.99), 4, 400, 20, 5, seed=1)
    better = choose(b)
    assert better.method != "majority-vote" and f"{better.method} foresees held-out labels best" in better.why
    assert ahead(better.posterior, b, truth) > 0.02
    none = choose(b, margin=1e6)
    assert none.method == "majority-vote" and "no better than the votes" in none.why
    assert_close(none.posterior, vote_proportions(b, 4))
    single, labels = crowd((0.6, 0.9), 4, 300, 20, 1, seed=0)
    one = choose(single)
    assert one.method == "majority-vote" and "no item has two labels" in one.why
    for name in ("auto", "dawid-skene", "one-coin"):
        assert abs(ahead(aggregate(single, name), single, labels)) < 0.01, name
    empty = choose(Annotations([0, 0], [], [], num_annotators=1, num_classes=2))
    assert empty.method == "majority-vote" and empty.posterior.tolist() == [[0.5, 0.5]]


def items_of(classes: int, items: int, distance: float, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(classes, (items,), generator=generator)
    return torch.randn(items, 8, generator=generator) + distance * torch.eye(classes, 8)[truth], truth


def label(truth: Tensor, classes: int, per_item: int, accuracy: float | Tensor, seed: int) -> Annotations:
    confusions = simulation.symmetric_confusions(40, classes, accuracy)
    return simulation.simulate(truth, confusions, annotations_per_item=per_item, seed=seed)


@pytest.mark.parametrize("per_item", [3, 5])
@pytest.mark.parametrize("distance", [0.0, 2.0, 6.0])
def test_features_help_where_they_say_something_and_never_harm(distance: float, per_item: int) -> None:
    gains = []
    for seed in range(3):
        x, truth = items_of(4, 300, distance, seed)
        a = label(truth, 4, per_item, 0.6, seed)
        found = feature_em(x, a)
        gains.append(ahead(found.posterior, a, truth))
        assert_close(found.posterior.sum(1), torch.ones(300).double())
        assert_close(found.confusion.sum(2), torch.ones(40, 4).double())
    assert sum(gains) / 3 > (-0.015 if distance == 0 else 0.02 if distance == 2 else 0.05), gains


def test_features_correct_what_everybody_confuses() -> None:
    """Votes hide it: half the items of a class are called the next one by all, and few annotators label much."""
    right, voted = [], []
    for seed in range(3):
        x, truth = items_of(4, 300, 3.0, seed)
        own = simulation.symmetric_confusions(40, 4, 0.8)
        confusions = 0.65 * own + 0.35 * torch.eye(4).to(own).roll(1, 1)
        a = simulation.simulate(truth, confusions, annotations_per_item=3, seed=seed)
        right.append(metrics.accuracy(feature_em(x, a).posterior, truth))
        voted.append(metrics.accuracy(vote_proportions(a, 4), truth))
    assert sum(voted) / 3 < 0.62 and sum(right) / 3 > 0.96, (voted, right)


def test_classes_do_not_change_places_where_everybody_is_hardly_right() -> None:
    """46 % right, 42 % the next class: the crowd's confusion is that of the votes where it loses the names."""
    x, truth = items_of(4, 300, 3.0, 2)
    own = simulation.symmetric_confusions(40, 4, 0.7)
    confusions = 0.65 * own + 0.35 * torch.eye(4).to(own).roll(1, 1)
    a = simulation.simulate(truth, confusions, annotations_per_item=3, seed=2)
    assert metrics.accuracy(feature_em(x, a).posterior, truth) > 0.4  # 0.07 where they do


def test_one_label_an_item_is_kept_and_features_decide_for_the_rest() -> None:
    x, truth = items_of(3, 200, 4.0, seed=0)
    a = label(truth, 3, 1, 0.7, seed=0)
    silent = torch.cat([a.indptr, a.indptr[-1:].expand(50)])
    more, more_truth = items_of(3, 50, 4.0, seed=1)
    wide = Annotations(silent, a.annotator, a.label, num_annotators=40, num_classes=3)
    posterior = feature_em(torch.cat([x, more]), wide).posterior
    assert torch.equal(posterior[:200].argmax(1), a.label)
    assert metrics.accuracy(posterior[200:], more_truth) > 0.9


def test_known_classes_hold_and_nothing_depends_on_units_or_constant_features() -> None:
    x, truth = items_of(3, 200, 3.0, seed=0)
    a = label(truth, 3, 3, 0.6, seed=0)
    gold = torch.where(torch.arange(200) < 40, (truth + 1) % 3, -1)  # wrong on purpose
    assert torch.equal(feature_em(x, a, gold=gold).posterior.argmax(1)[:40], gold[:40])
    one = feature_em(x.double(), a)
    scaled = torch.cat([x.double() * torch.logspace(-3, 3, 8).double() + 5, torch.full((200, 1), 7.0).double()], 1)
    assert_close(feature_em(scaled, a).posterior, one.posterior, atol=1e-6, rtol=0)
    assert torch.equal(feature_em(x, a).posterior, feature_em(x, a).posterior)


def test_an_items_prior_does_not_know_its_own_labels() -> None:
    """Another label of an item moves the priors of the others, never its own before a round has passed."""
    x, truth = items_of(3, 90, 5.0, seed=0)
    a = label(truth, 3, 3, 0.7, seed=0)
    changed = a.label.clone()
    changed[:3] = (changed[:3] + 1) % 3  # all of item 0
    other = Annotations(a.indptr, a.annotator, changed, num_annotators=40, num_classes=3)
    fixed: dict[str, Any] = {
        "rounds": 1,
        "shrinkages": (0.5,),
        "exponents": (1.0,),
        "confusion_prior": torch.eye(3) * 9 + 1,
    }
    one, two = (feature_em(x.double(), crowd_, **fixed).log_prior for crowd_ in (a, other))
    # the class prior is of all items: what is left of the differences between classes is the features' part
    gap = (one - two).sub((one - two)[:1])
    assert float(gap[0].abs().max()) == 0 and float(gap[1:].abs().max()) > 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": torch.zeros(3, 2)}, r"features is torch.float32 \[3, 2\] but must be floating point \[N, D\]"),
        ({"features": torch.zeros(20, 2).long()}, "features is torch.int64"),
        ({"features": torch.full((20, 2), float("nan"))}, r"features\[0\] is not finite"),
        ({"folds": 1}, "folds=1 must be an integer, 2 or more"),
        ({"rounds": 0}, "rounds=0 must be a positive integer"),
        ({"shrinkages": ()}, "shrinkages="),
        ({"exponents": (-1.0,)}, "exponents="),
        ({"confusion_prior": "votes"}, "confusion_prior='votes' must be"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    a = label(torch.arange(20) % 3, 3, 2, 0.7, seed=0)
    given = {"features": torch.randn(20, 2), **change}
    with pytest.raises(ValueError, match=message):
        feature_em(given.pop("features"), a, **given)


def test_as_many_folds_as_items_at_most() -> None:
    """A number that none can count to went on for ever."""
    x, truth = items_of(3, 12, 3.0, seed=0)
    a = label(truth, 3, 3, 0.7, seed=0)
    assert torch.equal(feature_em(x, a, folds=2**40).posterior, feature_em(x, a, folds=12).posterior)


def test_the_objective_trains_on_what_feature_em_finds() -> None:
    x, truth = items_of(4, 240, 3.0, seed=0)
    a = label(truth, 4, 4, torch.linspace(0.05, 0.95, 40), seed=0)
    objective = crowdnal.FeatureEM(4, 40)
    objective.on_train_start(a, lambda: (torch.zeros(240, 4), x))
    found = feature_em(x, a)
    assert found.pseudo_counts is not None and float(found.pseudo_counts.sum(1)[0]) < STRENGTHS[-1] - 1
    assert torch.equal(objective.targets, found.posterior.float())
    assert_close(objective.confusion_prior, found.pseudo_counts.float())
    assert ahead(objective.targets, a, truth) > 0.05
    with pytest.raises(RuntimeError, match="needs the features of all items"):
        crowdnal.FeatureEM(4, 40).on_train_start(a)
