"""What CMM finds on simulated crowds: groups, the mean confusion, where a group labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.two_levels import crowd, points, train
from torch import nn

import crowdnal
from crowdnal import metrics, simulation
from crowdnal.objectives import CMM


@pytest.mark.slow
def test_finds_the_groups_where_annotators_belong_to_one() -> None:
    """35 % of the annotators always name the next class; everyone gives 60 labels."""
    made, truth = crowd(items=480)
    callback = train(CMM(3, 40, num_groups=2, grouped="annotators", smoothing=1.0), points(truth), made.annotations)
    objective = callback.model.objective
    assert isinstance(objective, CMM)
    error = metrics.confusion_divergence(made.confusion, objective.confusion())
    assert error < 0.02  # single confusion: 0.2 and more
    members = objective.membership.argmax(1)
    agree = (members == made.groups).double().mean()
    assert max(agree, 1 - agree) == 1
    assert metrics.confusion_error(made.confusion, objective.confusion()) < 0.02
    predicted = callback.predict()[0]
    vote = metrics.accuracy(made.annotations.votes(), truth)
    assert metrics.accuracy(predicted, truth) > max(vote, 0.9)
    assert metrics.reliability_correlation(made.confusion, objective.confusion()) > 0.99
    assert [r.log_likelihood for r in callback.history][-1] > callback.history[0].log_likelihood


@pytest.mark.parametrize(("training", "epochs"), [pytest.param("em", 45, marks=pytest.mark.slow), ("gradient", 15)])
def test_finds_the_mean_confusion_and_beats_the_vote(training: str, epochs: int) -> None:
    """What the model of the paper identifies: the confusion of all annotators together (G-JS)."""
    made, truth = crowd(items=900, annotators=900)
    objective: Any = CMM(3, 900, training=training, setting="global", laplace=training == "em")
    callback = train(objective, points(truth), made.annotations, epochs)
    mean = made.confusion[made.annotations.annotator].mean(0)
    found = torch.einsum("m,mck->ck", objective.group_weights().double(), objective.group_confusion().double())
    assert metrics.confusion_divergence(mean[None], found[None]) < 0.006
    start = torch.full((1, 3, 3), 1 / 3)
    assert metrics.confusion_divergence(mean[None], start) > 0.05
    assert metrics.accuracy(callback.predict()[0], truth) > metrics.accuracy(made.annotations.votes(), truth) + 0.1


def test_gate_learns_where_a_group_labels() -> None:
    """Items on the right are labelled by experts, on the left by those who name the next class."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(3, (900,), generator=generator)
    right = torch.rand(900, generator=generator) < 0.5
    wrong = simulation.pair_flip_confusions(1, 3, 0.15, seed=None)[0]
    levels = torch.stack([wrong, simulation.symmetric_confusions(1, 3, 0.95)[0]])
    a = simulation.simulate(truth, levels.repeat(4, 1, 1), annotations_per_item=8, seed=1)
    a = a.select((a.annotator % 2 == 1) == right[a.item])
    x, side = points(truth), torch.where(right, 1.0, -1.0)[:, None]  # which the classifier does not see
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
    objective = CMM(3, 8, training="gradient", gate="features", num_groups=2, setting="global")
    model = crowdnal.attach(net, objective, features=lambda images: side)
    objective.set_feature_dim(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    objective.on_train_start(a)
    for _ in range(250):
        optimizer.zero_grad()
        model(x, a).loss.backward()
        optimizer.step()
    weights = objective.group_weights(side)
    expert = int(objective.group_confusion().diagonal(dim1=1, dim2=2).mean(1).argmax())
    assert weights.shape == (900, 2)
    assert weights[right, expert].mean() > 0.8 and weights[~right, expert].mean() < 0.2
