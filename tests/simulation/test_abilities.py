"""Crowds of a few levels of ability, the divergence of confusions, and restarts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.compare import assert_close
from torch import nn

import crowdnal
from crowdnal import Annotations, best_of_restarts, metrics, simulation
from crowdnal.simulation import ability_levels, perturbed_confusions

TRUTH = torch.arange(3000) % 3
LEVELS = torch.cat([simulation.symmetric_confusions(1, 3, right) for right in (0.9, 0.6, 1 / 3)])


def test_levels_have_their_shares_and_labels_their_confusions() -> None:
    made = ability_levels(TRUTH, LEVELS, (0.25, 0.55, 0.2), 2000, annotations_per_item=5, seed=1)
    a = made.annotations
    assert a.num_annotators == 2000 and made.confusion.shape == (2000, 3, 3)
    share = torch.bincount(made.groups, minlength=3) / 2000
    assert_close(share, torch.tensor([0.25, 0.55, 0.2]), atol=0.04, rtol=0)
    counts = a.counts.double()
    assert counts.min() >= 1 and abs(float(counts.mean()) - 5) < 0.15
    assert abs(float(counts.var()) - 5) < 0.6  # Binomial(2000, 5 / 2000)
    by_level = a.regroup(made.groups, 3)
    assert_close(metrics.empirical_confusion(TRUTH, by_level), LEVELS.double(), atol=0.04, rtol=0)
    again = ability_levels(TRUTH, LEVELS, (0.25, 0.55, 0.2), 2000, annotations_per_item=5, seed=1).annotations
    assert torch.equal(a.label, again.label) and torch.equal(a.annotator, again.annotator)
    few = ability_levels(TRUTH[:50], LEVELS, (0.0, 0.0, 1.0), 2, annotations_per_item=0.1, seed=0)
    assert (few.groups == 2).all() and few.annotations.counts.min() == 1


@pytest.mark.parametrize(
    ("probs", "annotators", "each", "message"),
    [
        ((0.5, 0.5), 10, 2, r"group_probs \[2\]"),
        ((0.5, 0.6, 0.1), 10, 2, "sum to 1"),
        ((1.5, -0.5, 0.0), 10, 2, "sum to 1"),
        ((0.3, 0.3, 0.4), 0, 2, "num_annotators=0"),
        ((0.3, 0.3, 0.4), 10, 11, "annotations_per_item=11"),
        ((0.3, 0.3, 0.4), 10, 0, "annotations_per_item=0"),
    ],
)
def test_bad_levels(probs: tuple[float, ...], annotators: int, each: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ability_levels(TRUTH, LEVELS, probs, annotators, annotations_per_item=each)


def test_noise_on_the_weights_makes_confusions() -> None:
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(5 * torch.eye(3))
    before, inputs = model.weight.clone(), torch.eye(3)[TRUTH]
    made = perturbed_confusions(model, inputs, TRUTH, (0.0, 5.0), seed=2)
    assert made.shape == (2, 3, 3) and torch.equal(model.weight, before)
    assert_close(made.sum(2), torch.ones(2, 3, dtype=made.dtype))
    expected = (1000 * torch.eye(3, dtype=torch.double) + 1) / 1003  # one label is added to every cell
    assert_close(made[0], expected)
    assert made[1].diagonal().mean() < 0.9
    assert torch.equal(made, perturbed_confusions(model, inputs, TRUTH, (0.0, 5.0), seed=2))


def test_divergence_by_hand() -> None:
    p, q = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]), torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    assert metrics.confusion_divergence(p, q) == pytest.approx(0.5)  # equal rows and opposite ones
    assert metrics.confusion_divergence(p, p) == 0
    a, b, m = (0.9, 0.1), (0.4, 0.6), (0.65, 0.35)
    bits = sum(x * math.log2(x / z) + y * math.log2(y / z) for x, y, z in zip(a, b, m, strict=True)) / 2
    one, two = torch.tensor([[a, a]]), torch.tensor([[b, b]])
    assert metrics.confusion_divergence(one, two) == pytest.approx(bits)
    assert metrics.confusion_divergence(two, one) == pytest.approx(bits)
    with pytest.raises(ValueError, match=r"estimate must be \[1, 2, 2\]"):
        metrics.confusion_divergence(one, two[0])
    with pytest.raises(ValueError, match="not probabilities"):
        metrics.confusion_divergence(2 * one, two)


def test_restarts_keep_the_likeliest() -> None:
    a = Annotations([0, 1, 2], [0, 0], [0, 1], num_annotators=1, num_classes=2)

    def train(seed: int, objective: Any = crowdnal.CMM) -> crowdnal.CrowdModel:
        model = crowdnal.attach(nn.Linear(2, 2), objective(2, 1))
        # the classifier contradicts the labels less the nearer the seed is to 7
        table = torch.tensor([[-1.0, 1.0], [1.0, -1.0]]) * abs(seed - 7)
        model.objective.on_train_start(a, lambda: (table, None))
        model.objective.on_epoch_start(1)
        return model

    found = best_of_restarts(train, 5, seed=5)
    assert found.seed == 7 and len(found.log_likelihoods) == 5
    assert found.model.objective.history[0].log_likelihood == max(found.log_likelihoods) == found.log_likelihoods[2]
    assert best_of_restarts(train, 1).log_likelihoods == [pytest.approx(train(0).objective.history[0].log_likelihood)]
    with pytest.raises(ValueError, match="restarts=0"):
        best_of_restarts(train, 0)
    with pytest.raises(ValueError, match=r"train\(3\) has made no round \(CrowdLayer\)"):
        best_of_restarts(lambda seed: train(seed, crowdnal.CrowdLayer), 2, seed=3)
