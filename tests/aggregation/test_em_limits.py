"""Where EM on annotations meets its limits: rounding, huge weights, no labels at all, messages that cancel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import assert_close
from torch import Tensor

import crowdnal
from crowdnal import Annotations, aggregate, conal_em, dawid_skene, mmce, one_coin, worker_clustering
from crowdnal._utils.probability import proportions
from crowdnal.aggregation import vote_proportions
from crowdnal.aggregation.clustering import cluster_matrices, farthest_first_clusters
from crowdnal.aggregation.common_confusion import CommonConfusionEM, Omega
from crowdnal.aggregation.em import FLOOR, iterate, weights_of
from crowdnal.simulation import simulate, symmetric_confusions

METHODS: list[Callable[..., Any]] = [dawid_skene, one_coin, mmce, conal_em, worker_clustering]


def crowd(weight: Tensor | None = None) -> Annotations:
    return Annotations([0, 2, 4], [0, 1, 0, 1], [0, 1, 1, 1], num_annotators=2, num_classes=2, weight=weight)


def few(method: Callable[..., Any]) -> dict[str, Any]:
    """No more clusters than annotators."""
    return {"num_clusters": 2} if method is worker_clustering else {}


# Probabilities of counts


@given(
    st.lists(st.lists(st.floats(0, 1e6) | st.just(0.0), min_size=3, max_size=3), min_size=1, max_size=5),
    st.sampled_from([None, FLOOR, 0.05]),
)
@settings(deadline=None)
def test_proportions_of_counts(rows: list[list[float]], floor: float | None) -> None:
    counts = torch.tensor(rows, dtype=torch.double)
    found = proportions(counts, 1, floor)
    for row, given_counts in zip(found.tolist(), rows, strict=True):
        total = sum(given_counts)
        wanted = np.array([c / total for c in given_counts] if total > 0 else [1 / 3] * 3)
        wanted = np.maximum(wanted, floor or 0)
        assert_close(row, wanted / wanted.sum(), rtol=1e-12)
    assert torch.equal(proportions(counts.T.contiguous(), 0, floor), found.T)


def test_proportions_of_nothing() -> None:
    assert proportions(torch.zeros(2, 0), 1).shape == (2, 0)
    assert proportions(torch.zeros(0, 4), 0).shape == (0, 4)


# The loop


def test_iterate_stops_where_it_should() -> None:
    values = iter([-5.0, -2.0, -1.5, -1.4, 0.0])
    assert iterate(lambda: None, lambda: next(values), 10, 0.2) == ([-5.0, -2.0, -1.5, -1.4], True)
    values = iter([-5.0, -2.0, -1.5])
    assert iterate(lambda: None, lambda: next(values), 2, 0.0) == ([-5.0, -2.0], False)
    assert iterate(lambda: None, lambda: 1.0, 3, -1.0) == ([1.0] * 3, False)
    assert iterate(lambda: None, lambda: 1.0, 3, 1e-9) == ([1.0] * 2, True)
    for most, tolerance, message in ((0, 1.0, "max_iterations must be 1 or more"), (1, math.nan, "tolerance must be")):
        with pytest.raises(ValueError, match=message):
            iterate(lambda: None, lambda: 1.0, most, tolerance)


# Rounding: a posterior that sums to 1 + 2e-16


@pytest.mark.parametrize("per", ["annotation", "annotator"])
def test_omega_is_a_probability_whatever_a_posterior_sums_to(per: Omega) -> None:
    a = crowd()
    em = CommonConfusionEM(a, None, per, 0.0, torch.double)
    em.posterior = torch.tensor([[0.5 + 2**-52, 0.5]] * 2, dtype=torch.double)
    assert float(em.posterior[0].sum()) > 1
    em.source = torch.ones_like(em.source)
    em.maximise()
    assert em.omega.tolist() == [1.0] * 4
    for _ in range(200):  # beyond 1 omega grew from here until both sources were negative
        em.own = em.own.new_tensor([[[0.9, 0.1], [0.1, 0.9]]] * 2)
        assert math.isfinite(em.expect()) and bool((em.source >= 0).all()) and bool((em.source <= 1).all())
        em.maximise()
        assert bool((em.omega >= 0).all()) and bool((em.omega <= 1).all())


def test_conal_em_stays_finite_on_a_sparse_crowd() -> None:
    truth = torch.arange(120) % 5
    a = simulate(truth, symmetric_confusions(60, 5, 0.8), annotations_per_item=5, seed=0)
    for omega in ("annotation", "annotator"):
        found = conal_em(a, omega=omega, max_iterations=300, tolerance=-1)
        assert_close(found.posterior.sum(1), torch.ones(120, dtype=torch.double))
        assert all(map(math.isfinite, found.log_likelihood)) and (np.diff(found.log_likelihood) > -1e-6).all()


# Weights near the largest number


@pytest.mark.parametrize("method", METHODS)
def test_weights_that_overflow_are_refused(method: Callable[..., Any]) -> None:
    heavy = crowd(torch.tensor([1, 1, 1e300, 1], dtype=torch.double))
    with pytest.raises(ValueError, match=r"annotations.weight\[2\] is inf.*torch.float32: divide all weights"):
        method(heavy, dtype=torch.float32, **few(method))
    with pytest.raises(ValueError, match=r"annotations.weight\[0\] is 1e\+308.*torch.float64"):
        method(crowd(torch.full((4,), 1e308, dtype=torch.double)), **few(method))
    large = method(crowd(torch.full((4,), 1e30, dtype=torch.double)), max_iterations=5, **few(method))
    assert_close(large.posterior.sum(1), torch.ones(2, dtype=torch.double))


def test_votes_that_overflow_are_refused() -> None:
    heavy = crowd(torch.full((4,), 3e38))
    for vote in (lambda: aggregate(heavy, "majority-vote"), lambda: vote_proportions(heavy, 2)):
        with pytest.raises(ValueError, match="weights of item 1 add up to more than torch.float32 holds"):
            vote()
    assert aggregate(crowd(torch.full((4,), 1e38)), "majority-vote").tolist() == [[0.5, 0.5], [0.0, 1.0]]


def test_the_sum_of_the_weights() -> None:
    assert weights_of(crowd(), torch.double) == (None, 4.0)
    weight, total = weights_of(crowd(torch.tensor([0.5, 0, 1, 2])), torch.double)
    assert weight is not None and weight.dtype == torch.double and total == 3.5
    assert weights_of(crowd(torch.zeros(4)), torch.double)[1] == 1.0


# No labels at all


@pytest.mark.parametrize("method", METHODS)
def test_data_without_classes_is_refused_and_without_labels_is_not(method: Callable[..., Any]) -> None:
    frame = Annotations.from_long({"task": [], "worker": [], "label": []})
    for a in (frame, Annotations([0, 0], [], [], num_annotators=0, num_classes=0)):
        with pytest.raises(ValueError, match="annotations have no classes, as there is no label: give classes"):
            method(a)
        assert aggregate(a, "majority-vote").shape == (len(a), 0)
    silent = Annotations([0, 0], [], [], num_annotators=2, num_classes=2)
    assert method(silent, **few(method)).posterior.tolist() == [[0.5, 0.5]]


# K-means


def test_clusters_of_annotators() -> None:
    """Both kinds of K-means find who answers alike, in the order each documents."""
    counts = torch.zeros(5, 2, 2, dtype=torch.double)
    counts[[0, 3]] = torch.tensor([[1.0, 9.0], [9.0, 1.0]]).double()  # [label, class]: always the other one
    counts[[1, 4]] = torch.tensor([[30.0, 1.0], [1.0, 30.0]]).double()
    member = farthest_first_clusters(counts, 2)
    assert member.argmax(1)[[0, 1, 3, 4]].tolist() == [1, 0, 1, 0]  # most labels first
    assert member.sum(1).tolist() == [1.0] * 5
    found = cluster_matrices(counts.transpose(1, 2), 3, seed=0)
    assert found.tolist() == [0, 1, 2, 0, 1]  # by appearance, and as many as differ
    pytest.importorskip("sklearn")
    assert len(cluster_matrices(counts.transpose(1, 2), 2, seed=0).unique()) == 2


# KOS


@pytest.mark.filterwarnings("ignore")
def test_kos_gives_no_class_where_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    crowdkit = pytest.importorskip("crowdkit.aggregation")
    pandas = pytest.importorskip("pandas")
    lonely = Annotations.from_dense([[0, -1], [-1, 1]], num_classes=2)  # no annotator confirms another
    with pytest.raises(ValueError, match=r"'kos' finds no class for an item, whose messages add up to 0.0"):
        aggregate(lonely, "kos")
    found = pandas.Series([1.0, float("nan")], index=[0, 1])
    monkeypatch.setattr(crowdkit.KOS, "fit_predict", lambda self, frame: found)
    assert aggregate(lonely, "kos").tolist() == [[0.0, 1.0], [0.5, 0.5]]


def test_kos_takes_two_classes() -> None:
    pytest.importorskip("crowdkit")
    a = Annotations.from_dense([[0, 1, 2]], num_classes=3)
    with pytest.raises(ValueError, match=r"'kos' \(KOS\) tells two classes apart, and these labels have 3"):
        aggregate(a, "kos")


def test_the_face_of_aggregation_is_its_methods() -> None:
    inner = {"FLOOR", "State", "possible", "check_gold", "check_prior", "log_proportions"}
    assert not inner & set(crowdnal.aggregation.__all__)
    for name in ("aggregate", "dawid_skene", "one_coin", "mmce", "conal_em", "worker_clustering", "posterior"):
        assert getattr(crowdnal.aggregation, name) is getattr(crowdnal, name)
