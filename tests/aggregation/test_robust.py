"""Never below the votes: the crowd's prior, Bayesian combination, the choice among methods."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from support.compare import assert_close
from support.crowds import ahead, simulated, weighted
from torch import Tensor

import crowdnal
from crowdnal import (
    Annotations,
    aggregate,
    bwa,
    cbcc,
    dawid_skene,
    ebcc,
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
