"""Defaults that hold where the papers' lose to the votes: single labels, uneven classes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

import crowdnal
from crowdnal import metrics, objectives, simulation


def accuracy(name: str, share: torch.Tensor, per_item: int, **options: Any) -> float:
    """Of a small network on unseen items, trained on a crowd of 20 who are right 60 to 90 % of the time."""
    generator = torch.Generator().manual_seed(0)
    classes, items = len(share), 400
    truth = torch.multinomial(share, 2 * items, replacement=True, generator=generator)
    centers = 2.2 * nn.functional.normalize(torch.randn(classes, 16, generator=generator), dim=1)
    x = centers[truth] + torch.randn(2 * items, 16, generator=generator)
    rates = 0.6 + 0.3 * torch.rand(20, generator=generator)
    confusions = simulation.symmetric_confusions(20, classes, rates)
    annotations = simulation.simulate(truth[:items], confusions, annotations_per_item=per_item, seed=0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, classes))
    objective = objectives.create(name, num_classes=classes, num_annotators=20, **options)
    objective.set_feature_dim(16)
    model = crowdnal.attach(net, objective, features=nn.Identity() if objective.needs_features else None)
    callback = crowdnal.ObjectiveCallback(model, (), annotations)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rows = torch.arange(items)

    def predict() -> tuple[torch.Tensor, torch.Tensor | None]:
        return crowdnal.training.predict_items(model, [(rows, x[:items])], items)

    callback.begin(0, predict)
    for epoch in range(40):
        callback.on_epoch_start(epoch)
        for batch in torch.randperm(items).split(32):
            optimizer.zero_grad()
            model(x[batch], annotations[batch]).loss.backward()
            optimizer.step()
        callback.on_epoch_end(epoch)
    with torch.no_grad():
        return metrics.accuracy(model(x[items:]), truth[items:])


@lru_cache
def votes_accuracy(share: tuple[float, ...], per_item: int) -> float:
    """Of a majority vote."""
    return accuracy("majority-vote", torch.tensor(share), per_item)


@pytest.mark.parametrize(
    "name",
    ["mbem", "conal-em", "dl-wc", "crowd-layer-over", "conal", "doctor-net", "weighted-doctor-net", "lia"],
)
def test_a_label_an_item(name: str) -> None:
    even = torch.ones(4)
    assert accuracy(name, even, 1) > votes_accuracy((1.0,) * 4, 1) - 0.03


def test_the_papers_mbem_loses_a_class() -> None:
    """Which is why its default is another: else this table of defaults could go back to the paper's."""
    even = torch.ones(4)
    assert accuracy("mbem", even, 1, soft=False, confusion_prior=None) < accuracy("mbem", even, 1) - 0.1


def test_uneven_classes() -> None:
    uneven = torch.tensor([8.0, 4.0, 2.0, 1.0])
    votes = accuracy("majority-vote", uneven, 3)
    assert accuracy("max-mig", uneven, 3) > votes - 0.02
    assert accuracy("max-mig", uneven, 3, init="votes", class_prior="uniform") < votes - 0.02


@pytest.mark.parametrize("name", ["crowd-layer", "crowd-layer-over"])
def test_twenty_classes(name: str) -> None:
    """Scores between 0 and 1 of twenty labels are all alike: the paper's matrices begin there, the crowd's do not."""
    even, votes = torch.ones(20), votes_accuracy((1.0,) * 20, 3)
    assert accuracy(name, even, 3) > votes - 0.01
    assert accuracy(name, even, 3, confusion_prior=None) < votes - 0.02


@pytest.mark.parametrize("name", ["ibcc", "ebcc"])
def test_a_tenth_of_the_items_has_more_than_one_label(name: str) -> None:
    """Whose annotator gave few others: the class prior and a weak prior would overrule them."""
    right: dict[str, list[float]] = {name: [], "majority-vote": []}
    for seed in range(1 if name == "ebcc" else 3):
        generator = torch.Generator().manual_seed(seed)
        truth = torch.multinomial(torch.ones(20), 600, replacement=True, generator=generator)
        confusions = simulation.symmetric_confusions(40, 20, 0.5 + 0.45 * torch.rand(40, generator=generator))
        full = simulation.simulate(truth, confusions, annotations_per_item=3, seed=seed)
        first = torch.arange(full.num_annotations) % 3 == 0
        kept = full.select(first | (torch.rand(600, generator=generator) < 0.1)[full.item])
        for method, found in right.items():
            found.append(metrics.accuracy(crowdnal.aggregate(kept, method), truth))
    assert sum(right[name]) > sum(right["majority-vote"]) - 0.02 * len(right[name])
