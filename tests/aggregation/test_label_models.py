"""One-coin Dawid-Skene, worker clustering and minimax conditional entropy: true labels from labels alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import assert_close
from support.crowds import coins, simulated, weighted
from torch import Tensor
from torch.nn.functional import one_hot

import crowdnal
from crowdnal import Annotations, metrics, mmce, worker_clustering
from crowdnal.aggregation._mmce import _Model
from crowdnal.simulation import simulate

dawid_skene = partial(crowdnal.dawid_skene, confusion_prior=None)  # the papers'
one_coin = partial(crowdnal.one_coin, reliability_prior=None, learn_class_prior=True)


def clustered() -> tuple[Annotations, Tensor, Tensor, Tensor]:
    """(annotations, truth, confusions, cluster) of 60 annotators of three kinds with 40 labels each."""
    eye = torch.eye(3, dtype=torch.double)
    kinds = torch.stack([0.8 * eye + 0.2 / 3, 0.2 * eye + 0.8 * eye.roll(1, 1), torch.full((3, 3), 1 / 3).double()])
    kind = torch.arange(60) % 5
    kind = torch.where(kind < 3, 0, kind - 2)
    truth = torch.randint(3, (600,), generator=torch.Generator().manual_seed(3))
    return simulate(truth, kinds[kind], annotations_per_item=4, seed=4), truth, kinds[kind], kind


# One coin


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_one_coin_is_crowdkits(iterations: int) -> None:
    aggregation = pytest.importorskip("crowdkit.aggregation")
    pandas = pytest.importorskip("pandas")
    a, _, _ = coins()
    frame = pandas.DataFrame({"task": a.item, "worker": a.annotator, "label": a.label})
    probas = aggregation.OneCoinDawidSkene(iterations, tol=-math.inf).fit(frame).probas_
    wanted = torch.from_numpy(probas.loc[range(len(a)), range(4)].to_numpy().copy())
    ours = one_coin(a, max_iterations=iterations, tolerance=-1)
    assert_close(ours.posterior, wanted, rtol=0, atol=1e-6)


def test_one_coin_iteration_by_hand() -> None:
    a, _, _ = simulated(3, 5, 12)
    a.weight = torch.linspace(0.5, 2, a.num_annotations, dtype=torch.double)
    rows = list(zip(a.item.tolist(), a.annotator.tolist(), a.label.tolist(), a.weight.tolist(), strict=True))
    votes = np.zeros((12, 3))
    for i, _, y, w in rows:
        votes[i, y] += w
    votes /= votes.sum(1, keepdims=True)
    right, total = np.full(5, 0.7), np.full(5, 0.7 + 0.2)
    for i, r, y, w in rows:
        right[r] += w * votes[i, y]
        total[r] += w
    skill, joint = right / total, np.tile(votes.mean(0), (12, 1))
    for i, r, y, w in rows:
        joint[i] *= np.where(np.arange(3) == y, skill[r], (1 - skill[r]) / 2) ** w
    prior = torch.tensor([0.5, 0.0], dtype=torch.double)
    result = one_coin(a, max_iterations=1, smoothing=0.2, reliability_prior=prior)
    assert_close(result.posterior, joint / joint.sum(1, keepdims=True))
    assert_close(result.confusion.diagonal(dim1=1, dim2=2), np.tile(skill[:, None], 3))
    assert_close(result.log_likelihood, [np.log(joint.sum(1)).sum()])
    density = (0.7 * np.log(skill) + 0.2 * np.log(1 - skill)).sum()
    assert_close(result.objective, [np.log(joint.sum(1)).sum() + density])


def test_one_coin_recovers_the_coins() -> None:
    a, truth, reliability = coins()
    result = one_coin(a)
    assert result.converged
    assert metrics.accuracy(result.labels, truth) > metrics.accuracy(a.votes(), truth) + 0.03
    assert metrics.reliability_correlation(reliability, result.confusion) > 0.94
    gold = torch.where(torch.arange(400) < 100, truth, -1)
    told = one_coin(a, gold=gold)
    assert torch.equal(told.posterior[:100], one_hot(truth[:100], 4).double())
    start = one_coin(a, initial_reliability=reliability, max_iterations=1)
    assert_close(start.confusion.diagonal(dim1=1, dim2=2), reliability.unsqueeze(1).expand(40, 4))


@settings(max_examples=30, deadline=None)
@given(st.data(), weighted(), st.sampled_from([0.0, 0.3]), st.sampled_from(["one coin", "clusters"]))
def test_the_objective_never_decreases(data: st.DataObject, a: Annotations, smoothing: float, which: str) -> None:
    options: dict[str, Any] = {"smoothing": smoothing}
    if data.draw(st.booleans()):
        known = st.lists(st.integers(-1, a.num_classes - 1), min_size=len(a), max_size=len(a))
        options["gold"] = torch.tensor(data.draw(known), dtype=torch.long)
    if which == "clusters":
        options["num_clusters"] = data.draw(st.integers(1, a.num_annotators))
    function: Callable[..., Any] = one_coin if which == "one coin" else worker_clustering
    result = function(a, max_iterations=10, tolerance=-1, **options)
    steps = np.diff(result.objective)
    assert len(steps) == 9 and (steps >= -1e-6 * (1 + abs(result.objective[0]))).all(), result.objective
    assert result.posterior.isfinite().all() and result.confusion.isfinite().all()
    assert_close(result.posterior.sum(1), torch.ones(len(a), dtype=torch.double))
    assert_close(result.confusion.sum(2), torch.ones(*result.confusion.shape[:2], dtype=torch.double))


# Clusters


def test_worker_clustering_finds_the_clusters() -> None:
    a, truth, confusion, kind = clustered()
    result = worker_clustering(a, 3)
    assert result.converged
    found = result.membership.argmax(1)
    names = torch.stack([found[kind == k].mode().values for k in range(3)])
    assert len(set(names.tolist())) == 3  # each kind is a cluster
    assert torch.equal(names[kind], found)
    assert metrics.confusion_error(confusion, result.confusion) < 0.003
    assert metrics.confusion_error(confusion, result.confusion) < metrics.confusion_error(
        confusion, worker_clustering(a, 60).confusion
    )
    assert metrics.accuracy(result.labels, truth) > metrics.accuracy(a.votes(), truth) + 0.1


def test_one_cluster_is_one_confusion_for_all() -> None:
    a, _, _ = simulated(3, 5, 60)
    together = Annotations(a.indptr, torch.zeros_like(a.annotator), a.label, num_annotators=1, num_classes=3)
    ours = worker_clustering(a, 1, max_iterations=4, tolerance=-1, smoothing=0.3)
    theirs = dawid_skene(together, max_iterations=4, tolerance=-1, confusion_prior=0.9)  # 3 cells of 0.3
    assert_close(ours.posterior, theirs.posterior)
    assert_close(ours.clusters, theirs.confusion)
    assert_close(ours.objective, theirs.objective)


# Minimax conditional entropy


def test_mmce_objective_and_posterior_by_hand() -> None:
    a, _, _ = simulated(3, 5, 12)
    a.weight = torch.linspace(0.5, 2, a.num_annotations, dtype=torch.double)
    result = mmce(a, max_iterations=3, tolerance=-1, strength=0.5)
    model = _Model(a, (0.5 * 9, 0.5 * 9 * 12 / 5), None, torch.double)
    for _ in range(3):
        model.maximise(20)
        last = model.expect()
    assert last == pytest.approx(result.objective[-1])
    sigma, tau = model.competence[..., 0].numpy(), model.difficulty[..., 0].numpy()
    joint = np.full((12, 3), math.log(1 / 3))
    for i, r, y, w in zip(a.item.tolist(), a.annotator.tolist(), a.label.tolist(), a.weight.tolist(), strict=True):
        scores = sigma[r] + tau[i]
        joint[i] += w * (scores[:, y] - np.log(np.exp(scores).sum(1)))
    posterior = np.exp(joint) / np.exp(joint).sum(1, keepdims=True)
    assert_close(result.posterior, posterior)
    penalty = 0.5 * (4.5 * (sigma**2).sum() + 10.8 * (tau**2).sum())
    assert result.objective[-1] == pytest.approx(penalty - np.log(np.exp(joint).sum(1)).sum())
    assert_close(result.confusion, np.exp(sigma) / np.exp(sigma).sum(2, keepdims=True))


def test_mmce_recovers_the_truth_and_its_objective_falls() -> None:
    a, truth, confusion, _ = clustered()
    result = mmce(a, strength=0.25)
    assert result.converged and (np.diff(result.objective) <= 1e-7).all()
    assert metrics.accuracy(result.labels, truth) > metrics.accuracy(a.votes(), truth) + 0.1
    assert metrics.reliability_correlation(confusion, result.confusion) > 0.95
    gold = torch.where(torch.arange(600) < 60, (truth + 1) % 3, -1)
    assert torch.equal(mmce(a, gold=gold, max_iterations=2).labels[:60], gold[:60])


def test_what_is_legal_and_repeats_bit_by_bit() -> None:
    a = Annotations([0, 3, 3, 6, 9], [0, 1, 2] * 3, [0, 0, 0, 1, 1, 0, 1, 0, 0], num_annotators=4, num_classes=3)
    for function in (one_coin, mmce, worker_clustering):
        result, again = function(a), function(a)
        assert torch.equal(result.posterior, again.posterior) and torch.equal(result.confusion, again.confusion)
        assert result.labels.tolist()[0] == 0 and result.posterior.isfinite().all()
        assert function(a, dtype=torch.float32).posterior.dtype == torch.float32
        for items, indptr in ((0, [0]), (2, [0, 0, 0])):
            empty = function(Annotations(indptr, [], [], num_annotators=3, num_classes=2))
            assert empty.posterior.shape == (items, 2)
            assert_close(empty.posterior, torch.full((items, 2), 0.5, dtype=torch.double))
    assert_close(one_coin(a).confusion[3], torch.full((3, 3), 1 / 3, dtype=torch.double))
    single = Annotations([0, 1], [0], [0], num_annotators=1, num_classes=1)
    assert all(f(single).posterior.tolist() == [[1.0]] for f in (one_coin, mmce))


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (one_coin, {"max_iterations": 0}, "max_iterations must be 1 or more"),
        (one_coin, {"gold": torch.zeros(3, dtype=torch.long)}, r"gold must be \[N\] integers for N = 200"),
        (one_coin, {"initial_reliability": torch.ones(3)}, r"initial_reliability has shape \(3,\).*R = 20"),
        (one_coin, {"initial_reliability": torch.full((20,), 1.5)}, r"initial_reliability\[0\] is 1.5, no probability"),
        (one_coin, {"reliability_prior": torch.ones(3)}, r"reliability_prior has shape \(3,\)"),
        (one_coin, {"reliability_prior": -torch.ones(2)}, "reliability_prior must hold pseudo-counts"),
        (mmce, {"strength": 0.0}, "strength must be above 0"),
        (mmce, {"item_weight": -1.0}, "item_weight must be above 0"),
        (mmce, {"steps": 0}, "steps must be 1 or more"),
        (mmce, {"tolerance": math.nan}, "tolerance must be a number"),
        (worker_clustering, {"num_clusters": 21}, "num_clusters=21 must be 1 to R=20"),
        (worker_clustering, {"smoothing": -1.0}, "smoothing must be finite"),
        (worker_clustering, {"dtype": torch.float16}, "dtype must be"),
    ],
)
def test_errors_name_the_argument(function: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(simulated(2, 20, 200)[0], **options)
