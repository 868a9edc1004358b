"""EM whose prior of an item comes from features, made without that item's own labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_close
from support.crowds import ahead
from torch import Tensor

import crowdnal
from crowdnal import Annotations, feature_em, metrics, simulation
from crowdnal._utils.folds import deal
from crowdnal.aggregation import vote_proportions
from crowdnal.aggregation.em import STRENGTHS


def items_of(classes: int, items: int, distance: float, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(classes, (items,), generator=generator)
    return torch.randn(items, 8, generator=generator) + distance * torch.eye(classes, 8)[truth], truth


def label(truth: Tensor, classes: int, per_item: int, accuracy: float | Tensor, seed: int) -> Annotations:
    confusions = simulation.symmetric_confusions(40, classes, accuracy)
    return simulation.simulate(truth, confusions, annotations_per_item=per_item, seed=seed)


def discriminant(train: np.ndarray, share: np.ndarray, test: np.ndarray, shrinkage: float) -> np.ndarray:
    """Log-likelihood ratios of the classes by a linear discriminant of fractional classes, written as in a textbook."""
    size = share.sum(0) + 1e-3
    means = [sum(q[k] * x for q, x in zip(share, train, strict=True)) / size[k] for k in range(share.shape[1])]
    within = sum(np.outer(x, x) for x in train) - sum(n * np.outer(m, m) for n, m in zip(size, means, strict=True))
    within = within / size.sum()
    within = (1 - shrinkage) * within + shrinkage * np.trace(within) / len(within) * np.eye(len(within))
    inverse = np.linalg.inv(within)
    return np.array([[x @ inverse @ m - m @ inverse @ m / 2 for m in means] for x in test])


def by_hand(x: Tensor, a: Annotations, prior: Tensor, shrinkage: float, exponent: float, rounds: int) -> np.ndarray:
    """Posteriors ``[N, C]`` of so many rounds, in loops."""
    table, fold = x.double().numpy(), deal(len(x), 5, 0).numpy()
    table = (table - table.mean(0)) / table.std(0)
    dense = a.to_dense(missing=-1).numpy()
    posterior = vote_proportions(a, a.num_classes).numpy()
    for _ in range(rounds):
        confusion = np.stack([prior.double().numpy()] * dense.shape[1])
        for i, r in zip(*np.nonzero(dense >= 0), strict=True):
            confusion[r, :, dense[i, r]] += posterior[i]
        confusion /= confusion.sum(2, keepdims=True)
        classes = posterior.sum(0) + 1
        logs = np.tile(np.log(classes / classes.sum()), (len(table), 1))
        for k in range(5):
            logs[fold == k] += exponent * discriminant(
                table[fold != k], posterior[fold != k], table[fold == k], shrinkage
            )
        for i, r in zip(*np.nonzero(dense >= 0), strict=True):
            logs[i] += np.log(confusion[r, :, dense[i, r]])
        posterior = np.exp(logs - logs.max(1, keepdims=True))
        posterior /= posterior.sum(1, keepdims=True)
    return posterior


@pytest.mark.parametrize(("rounds", "shrinkage", "exponent"), [(1, 0.3, 1.0), (3, 0.9, 0.35)])
def test_rounds_by_hand(rounds: int, shrinkage: float, exponent: float) -> None:
    x, truth = items_of(3, 60, 4.0, seed=0)
    a, prior = label(truth, 3, 3, 0.7, seed=0), torch.eye(3) * 4 + 1
    found = feature_em(
        x.double(), a, confusion_prior=prior, rounds=rounds, shrinkages=(shrinkage,), exponents=(exponent,)
    )
    assert (found.shrinkage, found.exponent) == (shrinkage, exponent)
    assert_close(found.posterior, torch.from_numpy(by_hand(x, a, prior, shrinkage, exponent, rounds)))


def test_the_discriminant_is_that_of_scikit_learn() -> None:
    """Of classes that are known: its pooled covariance, shrunk to the same level of the identity."""
    analysis = pytest.importorskip("sklearn.discriminant_analysis")
    x, truth = items_of(3, 90, 2.0, seed=1)
    table = x.double().numpy()
    known = analysis.LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.4).fit(table, truth.numpy())
    asked = known.decision_function(table) - np.log(known.priors_)
    found = discriminant(table, np.eye(3)[truth], table, 0.4)
    gap = (found - asked) - (found - asked).mean(1, keepdims=True)
    assert np.abs(gap).max() < 1e-3 * np.abs(asked).max()  # ours counts 1e-3 of an item more


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
