"""Reliability is balanced accuracy over all C true classes, by one definition wherever it is told; C > K and C < K."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import assert_close
from support.crowds import simulated
from torch import Tensor

import crowdnal
from crowdnal import Annotations, metrics, objectives
from crowdnal.train.outputs import estimate

R = 4
SIZES = [(5, 3), (3, 5), (4, 4)]
RECTANGULAR: list[tuple[str, dict[str, Any]]] = [
    ("crowd-layer", {}),
    ("crowd-layer", {"rank": 2}),
    ("crowd-layer", {"groups": [0, 1, 1, 0]}),
    ("crowd-layer", {"rank": 2, "groups": [0, 1, 1, 0]}),
    ("trace", {}),
    ("trace", {"rank": 2}),
    ("geocrowdnet", {}),
    ("geocrowdnet", {"rank": 1}),
    ("conal", {"feature_dim": 6}),
    ("conal", {"feature_dim": 6, "rank": 2}),
    ("cmm", {"training": "gradient"}),
    ("single-confusion", {}),
    ("lia", {"feature_dim": 6}),
    ("dl-em", {"initial_confusion": True}),
]


def by_hand(confusion: Tensor) -> list[float]:
    """Mean, over the true classes, of the probability of the label with the same number."""
    classes, labels = confusion.shape[1:]
    return [sum(float(a[c, c]) for c in range(min(classes, labels))) / classes for a in confusion]


def rows(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.double).softmax(-1)


def make(name: str, classes: int, labels: int, options: dict[str, Any]) -> crowdnal.Objective:
    torch.manual_seed(0)
    if "initial_confusion" in options:
        options = {"initial_confusion": rows(R, classes, labels)}
    made = objectives.create(name, num_classes=classes, num_annotators=R, num_labels=labels, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter))
    return made


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
@settings(deadline=None)
def test_of_confusions(classes: int, labels: int, annotators: int) -> None:
    confusion = rows(annotators, classes, labels)
    wanted = pytest.approx(by_hand(confusion))
    assert metrics.reliability(confusion).tolist() == wanted
    assert metrics.balanced_accuracy(confusion.diagonal(dim1=1, dim2=2), classes).tolist() == wanted


def test_it_is_how_often_a_label_is_right_where_classes_are_equally_common() -> None:
    """The third class has no label: who is right about all others is right twice in three."""
    truth = torch.arange(3).repeat(100)
    given_labels = torch.where(truth < 2, truth, 0)
    perfect = torch.eye(3, 2, dtype=torch.double)[None]
    perfect[0, 2, 0] = 1
    assert metrics.reliability(perfect).tolist() == pytest.approx([metrics.accuracy(given_labels, truth)])
    wide = torch.eye(2, 3, dtype=torch.double)[None]
    assert metrics.reliability(wide).tolist() == [1.0]


@pytest.mark.parametrize(("classes", "labels"), SIZES)
@pytest.mark.parametrize(("name", "options"), RECTANGULAR, ids=lambda value: str(value))
def test_of_objectives(name: str, options: dict[str, Any], classes: int, labels: int) -> None:
    made = make(name, classes, labels, options)
    confusion = made.confusion().detach().double()
    assert confusion.shape == (R, classes, labels)
    assert made.reliability().tolist() == pytest.approx(by_hand(confusion), abs=1e-6)
    assert_close(made.reliability().double(), metrics.reliability(confusion), rtol=0, atol=1e-6)


def test_of_the_command_is_the_share_of_right_labels() -> None:
    """What annotators.csv says: of the labels, whatever the objective's matrices hold."""
    a, _, _ = simulated(3, 10, 60)
    logits = torch.zeros(60, 3)
    for objective in (crowdnal.CrowdLayer(3, 10), crowdnal.SingleConfusion(3, 10), crowdnal.MajorityVote(3, 10)):
        found = estimate(objective, logits, a, None, torch.full((60,), -1), logits[:0])
        wanted = metrics.annotator_accuracy(found.posterior, a)
        assert torch.equal(found.reliability, wanted.mean) and len(set(wanted.mean.tolist())) > 1
        assert torch.equal(found.reliability_low, wanted.low) and torch.equal(found.reliability_high, wanted.high)


def test_annotator_accuracy_by_hand() -> None:
    """Two right of four, with the strength that is most probable: of many alike 1,024, so all are the crowd."""
    a = Annotations([0, 2, 4, 6, 8], [0, 1] * 4, [0, 1] * 2 + [1, 0] * 2, num_annotators=3, num_classes=2)
    truth = torch.tensor([0, 1, 1, 0])
    mean, low, high = metrics.annotator_accuracy(truth, a)
    right = [
        sum(int(truth[i] == y) for i, r, y in zip(a.item, a.annotator, a.label, strict=True) if r == n) for n in (0, 1)
    ]
    assert right == [2, 2]
    crowd = (4 + 1) / (8 + 2)
    assert mean.tolist() == pytest.approx([(2 + 1024 * crowd) / 1028] * 2 + [crowd])
    assert bool((low < mean).all() and (mean < high).all())
    soft = torch.nn.functional.one_hot(truth, 2) * 0.9 + 0.05
    assert_close(metrics.annotator_accuracy(soft, a).mean, mean, atol=0.03, rtol=0)
    with pytest.raises(ValueError, match=r"posterior must be \[N, C\] or \[N\] for N = 4"):
        metrics.annotator_accuracy(truth[:2], a)


def test_annotator_accuracy_follows_the_truth_and_not_the_number_of_labels() -> None:
    generator = torch.Generator().manual_seed(0)
    rates = torch.linspace(0.3, 0.95, 40).double()
    number = torch.randint(3, 80, (40,), generator=generator)
    item, annotator, label = [], [], []
    truth = torch.randint(4, (500,), generator=generator)
    for r in range(40):
        rows = torch.randperm(500, generator=generator)[: int(number[r])]
        right = torch.rand(len(rows), generator=generator) < rates[r]
        item.append(rows), annotator.append(torch.full_like(rows, r))
        label.append(torch.where(right, truth[rows], (truth[rows] + 1) % 4))
    order = torch.cat(item).argsort(stable=True)
    indptr = torch.cat([torch.zeros(1, dtype=torch.long), torch.cat(item).bincount(minlength=500).cumsum(0)])
    sizes = {"num_annotators": 40, "num_classes": 4}
    a = Annotations(indptr, torch.cat(annotator)[order], torch.cat(label)[order], **sizes)
    mean, low, high = metrics.annotator_accuracy(truth, a)
    assert metrics.reliability_correlation(rates, mean) > 0.8
    assert abs(metrics.reliability_correlation(number.double(), mean)) < 0.4
    assert 0.75 < float(((low < rates) & (rates < high)).double().mean()) <= 1  # 90 % where the prior is right
    few, many = (high - low)[number < 10].mean(), (high - low)[number > 60].mean()
    assert few > 1.5 * many


def test_of_conal_em_is_of_what_labels_come_from() -> None:
    """The individual confusion holds only what the common one does not explain: alone it ranks upside down."""
    made = crowdnal.CoNALEM(3, 2)
    eye, away = torch.eye(3), torch.eye(3).roll(1, 0)
    made.common.copy_(0.9 * eye + 0.1 / 3)
    made.individual.copy_(torch.stack([away, eye]))
    made.omega.copy_(torch.tensor([0.9, 0.1]))
    mixed = torch.stack([0.9 * made.common + 0.1 * away, 0.1 * made.common + 0.9 * eye]).transpose(1, 2)
    assert made.reliability().tolist() == pytest.approx(by_hand(mixed))


def test_conal_em_ranks_annotators_by_how_often_they_are_right() -> None:
    classes, annotators, items = 10, 40, 320
    skill, eye = torch.linspace(0.6, 1, annotators).double().view(-1, 1, 1), torch.eye(classes).double()
    truth = torch.arange(items) % classes
    confusion = skill * eye + (1 - skill) / classes
    a = crowdnal.simulation.simulate(truth, confusion, annotations_per_item=6, seed=0)
    right = torch.bincount(a.annotator, weights=(a.label == truth[a.item]).double(), minlength=annotators)
    made = crowdnal.CoNALEM(classes, annotators)
    made.on_train_start(a, lambda: (9 * eye.float()[truth], None))
    for epoch in range(1, 20):
        made.on_epoch_start(epoch)
    accuracy = right / torch.bincount(a.annotator, minlength=annotators)
    assert metrics.reliability_correlation(accuracy, made.reliability()) > 0.95
    assert metrics.reliability_correlation(accuracy, metrics.reliability(made.confusion())) < 0  # as it was


@pytest.mark.parametrize("measure", [metrics.confusion_error, metrics.confusion_divergence])
def test_an_estimate_must_be_confusions_too(measure: Any) -> None:
    eye = torch.eye(2)[None]
    for bad, shown in ((-5 * eye, r"\[-5.0, -0.0\]"), (2 * eye, r"\[2.0, 0.0\]"), (eye * torch.nan, r"\[nan")):
        with pytest.raises(ValueError, match=rf"estimate\[0, 0\] is {shown}.*not probabilities that sum to 1"):
            measure(eye, bad)
    assert measure(eye, eye) == 0
