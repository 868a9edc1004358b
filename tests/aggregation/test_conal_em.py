"""The EM variant of CoNAL: its closed forms by hand, a likelihood that never falls, and what it finds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.compare import assert_close
from support.crowds import crowd

from crowdnal import metrics
from crowdnal.aggregation import conal_em
from crowdnal.data import Annotations
from crowdnal.simulation import common_and_individual


@pytest.mark.parametrize("omega_of", ["annotation", "annotator"])
@pytest.mark.parametrize("with_prior", [False, True])
def test_two_iterations_by_hand(omega_of: str, with_prior: bool) -> None:
    a = crowd(items=10, annotators=4, classes=3)
    n, r_count, k_count = len(a), 4, 3
    rows = list(zip(a.item.tolist(), a.annotator.tolist(), a.label.tolist(), a.weight.tolist(), strict=True))
    generator = torch.Generator().manual_seed(0)
    log_prior = torch.randn(n, 3, generator=generator, dtype=torch.double).log_softmax(1) if with_prior else None
    q = np.zeros((n, 3))
    for i, _, y, w in rows:
        q[i, y] += w
    q[q.sum(1) == 0] = 1
    q /= q.sum(1, keepdims=True)
    source = np.full((len(rows), 3), 0.5)
    answered = sorted({i for i, *_ in rows})
    likelihoods = []
    for _ in range(2):
        common, own = np.full((3, k_count), 0.1), np.full((r_count, 3, k_count), 0.1)
        omega = np.zeros(len(rows))
        for m, (i, r, y, w) in enumerate(rows):
            for c in range(3):
                common[c, y] += w * q[i, c] * source[m, c]
                own[r, c, y] += w * q[i, c] * (1 - source[m, c])
                omega[m] += q[i, c] * source[m, c]
        if omega_of == "annotator":
            means = {}
            for r in range(r_count):
                mine = [(omega[m], row[3]) for m, row in enumerate(rows) if row[1] == r]
                means[r] = sum(o * w for o, w in mine) / max(sum(w for _, w in mine), 1e-10)
            omega = np.array([means[r] for _, r, _, _ in rows])
        common /= common.sum(1, keepdims=True)
        own /= own.sum(2, keepdims=True)
        prior = q[answered].mean(0)
        joint = np.tile(prior, (n, 1)) if log_prior is None else log_prior.exp().numpy().copy()
        for m, (i, r, y, w) in enumerate(rows):
            for c in range(3):
                together, alone = omega[m] * common[c, y], (1 - omega[m]) * own[r, c, y]
                source[m, c] = together / (together + alone)
                joint[i, c] *= (together + alone) ** w
        likelihoods.append(math.log(1) + float(np.log(joint.sum(1)).sum()))
        q = joint / joint.sum(1, keepdims=True)
    found = conal_em(a, log_prior=log_prior, omega=omega_of, max_iterations=2, tolerance=-1, smoothing=0.1)
    assert_close(found.posterior, q, rtol=1e-6)
    assert_close(found.common, common, rtol=1e-6)
    assert_close(found.confusion, own, rtol=1e-6)
    assert_close(found.log_likelihood, likelihoods, rtol=1e-6)
    expected = [(q[i] * source[m]).sum() for m, (i, *_) in enumerate(rows)]
    assert_close(found.source, expected, rtol=1e-6)


@pytest.mark.parametrize("omega_of", ["annotation", "annotator"])
def test_the_likelihood_never_falls(omega_of: str) -> None:
    found = conal_em(crowd(items=60, annotators=8, classes=4), omega=omega_of, max_iterations=40, tolerance=-1)
    steps = np.diff(found.log_likelihood)
    assert len(steps) == 39 and (steps > -1e-9 * abs(found.log_likelihood[0])).all() and steps[:5].min() > 1e-4


def test_finds_the_common_confusion_and_beats_the_vote() -> None:
    truth = torch.randint(5, (3000,), generator=torch.Generator().manual_seed(0))
    features = torch.randn(3000, 4, generator=torch.Generator().manual_seed(1))
    made = common_and_individual(
        truth, features, 12, 5, common_strength=0.45, individual_strength=0.45, annotations_per_item=5, seed=3
    )
    found = conal_em(made.annotations, omega="annotator")
    vote = metrics.accuracy(made.annotations.votes(), truth)
    assert metrics.accuracy(found.labels, truth) > vote + 0.02
    error = (found.common - made.common).square().mean()
    assert (error < (found.confusion - made.common).square().mean((1, 2))).all()


def test_what_is_missing() -> None:
    a = Annotations([0, 0, 2], [0, 0], [1, 1], num_annotators=2, num_classes=3)
    found = conal_em(a)
    assert found.posterior.isfinite().all() and found.labels[1] == 1
    assert_close(found.confusion[1], torch.full((3, 3), 1 / 3, dtype=torch.double))
    nothing = conal_em(Annotations([0, 0], [], [], num_annotators=2, num_classes=3))
    assert_close(nothing.posterior, torch.full((1, 3), 1 / 3, dtype=torch.double))
    other = Annotations([0, 1, 2], [0, 1], [0, 4], num_annotators=2, num_classes=5)
    prior = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log()
    assert conal_em(other, log_prior=prior).confusion.shape == (2, 2, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"omega": "item"}, "omega='item'"),
        ({"max_iterations": 0}, "max_iterations"),
        ({"tolerance": math.nan}, "tolerance"),
        ({"smoothing": -1}, "smoothing"),
        ({"dtype": torch.float16}, "dtype"),
        ({"log_prior": torch.zeros(3, 3)}, "log_prior"),
    ],
)
def test_errors(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conal_em(crowd(items=4), **options)
