"""The EM of CMM: its formulas by the book, a likelihood that never falls, and where it starts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import assert_close
from support.crowds import build, crowd
from torch import Tensor

from crowdnal import simulation
from crowdnal.aggregation.clustering import fit_clusters, largest_first
from crowdnal.data import Annotations
from crowdnal.objectives.cmm import init as cmm_start
from crowdnal.objectives.cmm.em import (
    expect,
    expect_annotators,
    group_log_probs,
    group_posteriors,
    label_cells,
    maximise,
)
from crowdnal.objectives.cmm.init import cluster_annotators, cluster_labels, initial_counts

SIZES = st.tuples(st.integers(0, 8), st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))


def model(items: int, groups: int, classes: int, labels: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """log f [N, C], log alpha [M], log beta [M, K, C]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((items, classes), (groups,), (groups, labels, classes))
    f, a, b = (torch.randn(shape, generator=generator, dtype=torch.double) for shape in shapes)
    return f.log_softmax(1), a.log_softmax(0), b.log_softmax(1)


def labels_of(items: int, annotators: int, labels: int, weighted: bool, seed: int = 0) -> Annotations:
    rng = np.random.default_rng(seed)
    rows = [[(int(rng.integers(annotators)), int(rng.integers(labels))) for _ in range(rng.integers(5))]
            for _ in range(items)]  # fmt: skip
    nnz = sum(map(len, rows))
    return build(rows, annotators, labels, weight=torch.from_numpy(rng.random(nnz)) if weighted else None)


def dense_counts(a: Annotations) -> Tensor:
    r = torch.zeros(len(a), a.num_classes, dtype=torch.double)
    for n, (i, j) in enumerate(zip(a.item.tolist(), a.label.tolist(), strict=True)):
        r[i, j] += 1.0 if a.weight is None else float(a.weight[n])
    return r


@settings(deadline=None, max_examples=40)
@given(SIZES, st.booleans())
def test_e_and_m_step_are_those_of_the_paper(sizes: tuple[int, int, int, int, int], weighted: bool) -> None:
    """Equations 4 to 7 with the whole N x K x M x C tensor of q."""
    items, annotators, groups, classes, labels = sizes
    a = labels_of(items, annotators, labels, weighted)
    log_f, log_alpha, log_beta = model(items, groups, classes, labels)
    f, alpha, beta, r = log_f.exp(), log_alpha.exp(), log_beta.exp().transpose(1, 2), dense_counts(a)
    q = torch.einsum("mkj,ik,m->ijmk", beta, f, alpha)
    total = q.sum((2, 3))
    q = q / total[:, :, None, None]
    found = expect(log_f, log_alpha, log_beta, label_cells(a))
    assert_close(found.log_likelihood, (r * total.log()).sum())
    assert_close(found.targets, torch.einsum("ij,ijmk->ik", r, q))
    assert_close(found.counts, torch.einsum("ij,ijmk->mjk", r, q))
    for smoothing in (0.0, 1.0):
        new_alpha, new_beta = (value.exp() for value in maximise(found, smoothing))
        expected = torch.einsum("ij,ijmk->m", r, q) + smoothing
        if expected.sum() > 0:
            assert_close(new_alpha, expected / expected.sum())
        expected = torch.einsum("ij,ijmk->mjk", r, q) + smoothing
        expected = expected / expected.sum(1, keepdim=True)
        known = expected.isfinite()
        assert_close(new_beta[known], expected[known], rtol=1e-6, atol=1e-9)
        assert_close(new_beta.sum(1), torch.ones(groups, classes, dtype=torch.double))


@settings(deadline=None, max_examples=30)
@given(SIZES, st.booleans())
def test_annotators_in_groups_by_the_book(sizes: tuple[int, int, int, int, int], weighted: bool) -> None:
    items, annotators, groups, classes, labels = sizes
    a = labels_of(items, annotators, labels, weighted)
    log_f, log_alpha, log_beta = model(items, groups, classes, labels)
    f, alpha, beta = log_f.exp(), log_alpha.exp(), log_beta.exp().transpose(1, 2)
    weight = torch.ones(a.num_annotations, dtype=torch.double) if a.weight is None else a.weight
    each = torch.stack([f[a.item] @ beta[m] for m in range(groups)], 1)  # [nnz, M, K]
    each = each[torch.arange(a.num_annotations), :, a.label]
    assert_close(group_log_probs(log_f, log_beta, a).exp(), each)
    joint = alpha.expand(annotators, -1).clone()
    for n, r in enumerate(a.annotator.tolist()):
        joint[r] *= each[n] ** weight[n]
    posterior = joint / joint.sum(1, keepdim=True)
    assert_close(group_posteriors(each.log(), log_alpha, a), posterior)
    counts, targets = torch.zeros(groups, labels, classes).double(), torch.zeros(items, classes).double()
    for n, (i, r, y) in enumerate(zip(a.item.tolist(), a.annotator.tolist(), a.label.tolist(), strict=True)):
        for m in range(groups):
            q = posterior[r, m] * f[i] * beta[m, :, y] / each[n, m] * weight[n]
            counts[m, y] += q
            targets[i] += q
    found = expect_annotators(log_f, log_alpha, log_beta, a)
    assert_close(found.log_likelihood, joint.sum(1).log().sum())
    assert_close(found.counts, counts)
    assert_close(found.targets, targets)
    used = sorted(set(a.annotator.tolist()))
    assert_close(found.groups, posterior[used].sum(0))


@pytest.mark.parametrize("find", [expect, expect_annotators])
def test_the_likelihood_never_falls(find) -> None:
    """With the classifier as a free table, M-step and all: f_i = the item's targets, normalised."""
    truth = torch.arange(120) % 3
    levels = torch.cat([simulation.symmetric_confusions(6, 3, 0.9), simulation.symmetric_confusions(6, 3, 0.3)])
    a = simulation.simulate(truth, levels, annotations_per_item=4, seed=1)
    given = a if find is expect_annotators else label_cells(a)
    log_f, log_alpha, log_beta = model(120, 3, 3, 3)
    for free in (False, True):
        likelihoods = []
        for _ in range(25):
            found = find(log_f, log_alpha, log_beta, given)
            likelihoods.append(float(found.log_likelihood))
            log_alpha, log_beta = maximise(found)
            if free:
                log_f = (found.targets / found.targets.sum(1, keepdim=True)).clamp(min=1e-12).log().log_softmax(1)
        steps = np.diff(likelihoods)
        assert (steps > -1e-7).all() and steps[0] > 1


def test_cells_are_the_frequencies_of_labels() -> None:
    a = crowd(items=20, annotators=4, classes=3)
    for each in (a, Annotations(a.indptr, a.annotator, a.label, num_annotators=4, num_classes=3)):
        cells = label_cells(each)
        assert_close(dense_counts(cells), dense_counts(each))
        key = cells.item * 3 + cells.label
        assert (key.diff() > 0).all() and cells.num_annotators == 1
    empty = label_cells(Annotations([0, 0, 0], [], [], num_annotators=2, num_classes=3))
    assert len(empty) == 2 and empty.num_annotations == 0


def shares_of(a: Annotations) -> Tensor:
    votes = a.votes().double()
    return torch.where(votes.sum(1, keepdim=True) > 0, votes / votes.sum(1, keepdim=True), 1 / votes.shape[1])


def test_start_is_the_votes_divided_by_groups() -> None:
    a = crowd(items=30, annotators=5, classes=3)
    cells = label_cells(a)
    groups = torch.arange(cells.num_annotations) % 2
    found = initial_counts(cells, shares_of(a), groups, 2)
    expected = torch.zeros(2, 3, 3).double()
    for n, (i, y) in enumerate(zip(cells.item.tolist(), cells.label.tolist(), strict=True)):
        expected[int(groups[n]), y] += shares_of(a)[i] * cells.weight[n]
    assert_close(found.counts, expected)
    assert_close(found.targets, a.votes().double())
    assert_close(found.groups, expected.sum((1, 2)))


def test_clusters_tell_labels_that_agree_from_those_that_do_not() -> None:
    """Five labels an item of which one is wrong: a group of its own, whatever the class."""
    rows = [[(r, k) for r in range(4)] + [(4, (k + 1) % 3)] for k in range(3) for _ in range(20)]
    a = build(rows, 5, 3)
    cells = label_cells(a)
    groups = cluster_labels(cells, shares_of(a), 4, seed=3)
    right = cells.weight == 4
    assert not set(groups[right].tolist()) & set(groups[~right].tolist())
    assert torch.equal(groups, cluster_labels(cells, shares_of(a), 4, seed=3))
    known = cluster_annotators(a, shares_of(a), 2)
    assert known.tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("items", [0, 1, 2])
@pytest.mark.parametrize("groups", [1, 3, 9])
def test_clusters_of_next_to_nothing(items: int, groups: int) -> None:
    a = build([[(0, 1)]] * items, 2, 3)
    cells = label_cells(a)
    for found in (cluster_labels(cells, shares_of(a), groups), cluster_annotators(a, shares_of(a), groups)):
        assert (found == 0).all()
    found = initial_counts(cells, shares_of(a), cluster_labels(cells, shares_of(a), groups), groups)
    for value in maximise(found):
        assert value.isfinite().all()
    weightless = build([[(0, 1), (0, 2)]], 1, 3, weight=torch.zeros(2))
    assert cluster_labels(label_cells(weightless), shares_of(weightless), groups).tolist() == [0, 0]


def test_never_more_clusters_than_points_and_the_largest_first() -> None:
    points = np.array([[0.0], [0.0], [0.0], [5.0], [5.0], [9.0]])
    for wanted in (3, 5):
        groups = torch.from_numpy(fit_clusters(points, wanted, 0)(points))
        assert largest_first(groups, None, wanted).tolist() == [0, 0, 0, 1, 1, 2]
        weight = torch.tensor([1, 1, 1, 1, 1, 9.0])
        assert largest_first(groups, weight, wanted).tolist() == [1, 1, 1, 2, 2, 0]
    with_none = fit_clusters(points, 2, 0, components=3)
    assert with_none(np.array([[8.0], [1.0]]))[0] == with_none(points)[5]


def test_many_cells_are_divided_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[(r, k) for r in range(4)] + [(4, (k + 1) % 3)] for k in range(3) for _ in range(20)]
    a = build(rows, 5, 3)
    cells = label_cells(a)
    kind = (cells.item // 20) * 3 + cells.label  # six, whose votes and label are the same
    for most in (10_000, 40):
        monkeypatch.setattr(cmm_start, "MOST", most)
        groups = cluster_labels(cells, shares_of(a), 6)
        assert len(set(zip(kind.tolist(), groups.tolist(), strict=True))) == len(set(groups.tolist())) == 6


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(ImportError, match=r"crowdnal\[train\]"):
        fit_clusters(np.array([[0.0], [1.0]]), 2, 0)
