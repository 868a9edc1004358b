from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import assert_close

from crowdnal.data import Annotations
from crowdnal.metrics import (
    accuracy,
    confusion_error,
    empirical_confusion,
    expected_calibration_error,
    reliability,
    reliability_correlation,
    spammer_score,
)

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))


def confusions(*shape: int, seed: int = 0, sharpness: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(*shape, generator=generator, dtype=torch.float64)).softmax(-1)


def test_accuracy() -> None:
    assert accuracy([0, 1, 2, 1], [0, 1, 1, 1]) == 0.75
    assert accuracy(torch.tensor([[0.5, 0.5], [0.1, 0.9]]), torch.tensor([0, 1])) == 1.0
    assert accuracy(torch.tensor([[0.5, 0.5]]), torch.tensor([1])) == 0.0
    assert accuracy(np.array([1]), np.array([1])) == 1.0
    for prediction, truth in ([[], []], [[0, 1], [0]], [[0, 1], [0.0, 1.0]], [torch.zeros(2, 2, 2), [0, 1]]):
        with pytest.raises(ValueError, match=r"truth must be \[N\] integers"):
            accuracy(prediction, torch.tensor(truth))


def test_calibration_error_by_hand() -> None:
    # Bins (0.5, 0.75] and (0.75, 1] of four: confidences .6 .75 | .8 1, right 1 0 | 1 0.
    probs = torch.tensor([[0.6, 0.4], [0.75, 0.25], [0.2, 0.8], [1.0, 0.0]])
    truth = torch.tensor([0, 1, 1, 1])
    assert expected_calibration_error(probs, truth, bins=4) == pytest.approx((0.35 + 0.8) / 4)
    assert expected_calibration_error(probs, truth, bins=1) == pytest.approx((3.15 - 2) / 4)
    assert expected_calibration_error(torch.eye(3), torch.arange(3)) == 0
    assert expected_calibration_error(torch.eye(3), torch.tensor([1, 2, 0])) == 1


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 99))
@settings(deadline=None)
def test_calibration_error_is_the_sum_over_bins(items: int, bins: int, seed: int) -> None:
    probs = confusions(1, items, 3, seed=seed)[0]
    truth = torch.randint(0, 3, (items,), generator=torch.Generator().manual_seed(seed))
    confidence, prediction = probs.max(1)
    total = 0.0
    for m in range(bins):
        inside = (confidence > m / bins) & (confidence <= (m + 1) / bins)
        if inside.any():
            right = (prediction == truth)[inside].double().mean()
            total += float(inside.double().mean() * (right - confidence[inside].mean()).abs())
    assert expected_calibration_error(probs, truth, bins) == pytest.approx(total, abs=1e-9)


def test_calibration_error_refuses_logits() -> None:
    with pytest.raises(ValueError, match=r"probs\[1\] is \[3.0, -1.0\].*softmax"):
        expected_calibration_error(torch.tensor([[0.5, 0.5], [3.0, -1.0]]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="bins must be 1 or more"):
        expected_calibration_error(torch.eye(2), torch.arange(2), bins=0)


def test_reliability_is_the_mean_of_the_diagonal() -> None:
    confusion = torch.tensor([[[0.9, 0.1], [0.4, 0.6]], [[0.5, 0.5], [0.5, 0.5]]])
    assert_close(reliability(confusion), torch.tensor([0.75, 0.5]))
    assert reliability(torch.eye(2).repeat(2, 1)[None, :3]).tolist() == pytest.approx([2 / 3])


# Spammer score


@given(SHAPES)
@settings(deadline=None)
def test_spammer_score_is_zero_for_equal_rows(shape: tuple[int, int, int]) -> None:
    annotators, classes, labels = shape
    spammers = confusions(annotators, 1, labels).expand(-1, classes, -1)
    assert_close(spammer_score(spammers), torch.zeros(annotators, dtype=torch.float64))


@given(SHAPES, st.integers(0, 99))
@settings(deadline=None)
def test_spammer_score_is_between_zero_and_one(shape: tuple[int, int, int], seed: int) -> None:
    score = spammer_score(confusions(*shape, seed=seed, sharpness=20.0))
    assert score.shape == shape[:1] and bool((score >= 0).all()) and bool((score <= 1).all())
    if shape[1] > 1 and shape[2] > 1:
        assert bool((score > 0).all())


@pytest.mark.parametrize(("classes", "labels"), list(itertools.product(range(1, 5), range(1, 5))))
def test_spammer_score_of_the_best_annotator_is_one(classes: int, labels: int) -> None:
    """The largest score over all deterministic annotators is 1, and convexity makes them the best."""
    answers = torch.tensor(list(itertools.product(range(labels), repeat=classes)))
    score = spammer_score(torch.nn.functional.one_hot(answers, labels).double())
    assert float(score.max()) == pytest.approx(1 if classes > 1 and labels > 1 else 0)


def test_spammer_score_of_identity_and_permutation() -> None:
    for classes in (2, 3, 10, 200):
        eye = torch.eye(classes)
        both = torch.stack([eye, eye.roll(1, 0)])
        assert_close(spammer_score(both), torch.ones(2))
        wide = torch.cat([eye, torch.zeros(classes, 2)], 1)[None]
        assert_close(spammer_score(wide), torch.ones(1))


def test_spammer_score_of_the_paper() -> None:
    """(sensitivity + specificity - 1)² for two classes, 1/(C(C-1)) Σ_{c<c'} Σ_k (A_ck - A_c'k)² for C."""
    alpha, beta = 0.8, 0.7
    binary = torch.tensor([[[beta, 1 - beta], [1 - alpha, alpha]]], dtype=torch.float64)
    assert float(spammer_score(binary)) == pytest.approx((alpha + beta - 1) ** 2)
    matrix = confusions(1, 4, 4)[0]
    pairs = itertools.combinations(range(4), 2)
    expected = sum(float((matrix[c] - matrix[d]).square().sum()) for c, d in pairs) / 12
    assert float(spammer_score(matrix[None])) == pytest.approx(expected)


# Empirical confusion


@st.composite
def labelled(draw: st.DrawFn) -> tuple[Annotations, torch.Tensor]:
    annotators, classes, labels = draw(SHAPES)
    pair = st.tuples(st.integers(0, annotators - 1), st.integers(0, labels - 1))
    rows = draw(st.lists(st.lists(pair, max_size=5), min_size=0, max_size=6))
    flat = [p for row in rows for p in row]
    weight = draw(st.none() | st.lists(st.floats(0, 3), min_size=len(flat), max_size=len(flat)))
    a = Annotations(
        np.cumsum([0] + [len(row) for row in rows]),
        [r for r, _ in flat],
        [y for _, y in flat],
        num_annotators=annotators,
        num_classes=labels,
        weight=None if weight is None else torch.tensor(weight, dtype=torch.float64),
    )
    return a, confusions(1, len(rows), classes)[0]


@given(labelled(), st.sampled_from([0.0, 0.5, 2.0]))
@settings(deadline=None)
def test_empirical_confusion_counts(data: tuple[Annotations, torch.Tensor], smoothing: float) -> None:
    a, posterior = data
    counts = torch.full((a.num_annotators, posterior.shape[1], a.num_classes), smoothing / a.num_classes).double()
    weight = torch.ones(a.num_annotations) if a.weight is None else a.weight
    for n, (i, r, y) in enumerate(zip(a.item, a.annotator, a.label, strict=True)):
        counts[r, :, y] += weight[n] * posterior[i]
    total = counts.sum(2, keepdim=True)
    expected = torch.where(total > 0, counts / total, torch.ones_like(counts) / a.num_classes)
    result = empirical_confusion(posterior, a, smoothing=smoothing)
    assert_close(result, expected)
    assert_close(result.sum(2), torch.ones(result.shape[:2], dtype=torch.float64))


def test_empirical_confusion_is_true_by_observed() -> None:
    """Always wrong in one direction: a transposed matrix would show the other."""
    a = Annotations.from_dense([[1], [1], [1], [0]], num_classes=2)
    assert empirical_confusion([0, 1, 1, 0], a).tolist() == [[[0.5, 0.5], [0.0, 1.0]]]
    soft = torch.nn.functional.one_hot(torch.tensor([0, 1, 1, 0]), 3)
    assert empirical_confusion(soft, a).tolist() == [[[0.5, 0.5], [0.0, 1.0], [0.5, 0.5]]]


def test_empirical_confusion_names_what_is_wrong() -> None:
    a = Annotations.from_dense([[1], [0]], num_classes=2)
    with pytest.raises(ValueError, match=r"posterior\[1\] is class 2, outside \[0, 2\)"):
        empirical_confusion([0, 2], a)
    with pytest.raises(ValueError, match=r"posterior\[0\] is class -1"):
        empirical_confusion([-1, 0], a)
    with pytest.raises(ValueError, match="N = 2 items, got"):
        empirical_confusion(torch.zeros(3, 2), a)
    with pytest.raises(ValueError, match="known classes as integers"):
        empirical_confusion([0.5, 0.5], a)
    with pytest.raises(ValueError, match="smoothing must be finite"):
        empirical_confusion([0, 1], a, smoothing=-1)


# Comparisons


def test_confusion_error() -> None:
    eye, flat = torch.eye(2)[None], torch.full((1, 2, 2), 0.5)
    assert confusion_error(eye, eye) == 0
    assert confusion_error(eye, flat) == pytest.approx(4 * 0.25 / 2)
    assert confusion_error(eye, eye.flip(1)) == pytest.approx(2)
    both = torch.cat([eye, eye])
    assert confusion_error(both, torch.cat([eye, flat])) == pytest.approx(0.25)
    with pytest.raises(ValueError, match=r"estimate must be \[1, 2, 2\]"):
        confusion_error(eye, both)


def test_reliability_correlation() -> None:
    truth = torch.tensor([0.2, 0.5, 0.9, 0.7])
    assert reliability_correlation(truth, truth / 2 + 0.1) == pytest.approx(1)
    assert reliability_correlation(truth, -truth) == pytest.approx(-1)
    other = torch.tensor([0.3, 0.1, 0.8, 0.9])
    expected = np.corrcoef(truth.numpy(), other.numpy())[0, 1]
    assert reliability_correlation(truth, other) == pytest.approx(expected, abs=1e-6)
    confusion = confusions(4, 3, 3)
    assert reliability_correlation(confusion, reliability(confusion)) == pytest.approx(1)
    assert math.isnan(reliability_correlation(truth, torch.ones(4)))
    assert math.isnan(reliability_correlation(torch.ones(1), torch.ones(1)))
    with pytest.raises(ValueError, match=r"must each be \[R\] or \[R, C, K\]"):
        reliability_correlation(truth, torch.ones(3))


@pytest.mark.parametrize("measure", [spammer_score, reliability, lambda a: confusion_error(a, a)])
def test_confusions_must_be_confusions(measure) -> None:
    with pytest.raises(ValueError, match=r"confusion\[1, 0\] is \[2.0, 0.0\].*last dimension"):
        measure(torch.stack([torch.eye(2), 2 * torch.eye(2)]))
    with pytest.raises(ValueError, match=r"confusion must be \[R, C, K\].*\[None\]"):
        measure(torch.eye(2))
    with pytest.raises(ValueError, match=r"confusion\[0, 1\] is \[nan"):
        measure(torch.tensor([[[1.0, 0.0], [math.nan, 1.0]]]))
