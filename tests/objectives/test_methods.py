"""What is special to each objective, and what each recovers from planted crowds."""

from __future__ import annotations

import math

import pytest
import torch
from support.compare import assert_close
from support.memory import Largest
from support.planted import annotate, blobs, fit, planted
from support.small_crowd import ANNOTATOR, LABEL, MAKERS, C, R, batch, logits_of, perturbed
from torch import nn
from torch.nn import functional as F

from crowdnal.data import Annotations
from crowdnal.objectives import (
    OBJECTIVES,
    CrowdLayer,
    MajorityVote,
    Objective,
    SoftMajorityVote,
    TraceRegularized,
    create,
)

# Majority voting


def test_majority_ties_go_to_the_lowest_class():
    labels = [2, 1, 0, 2, 2, 1, 1, 0]
    annotations = Annotations([0, 2, 4, 8], [0, 1] * 4, labels, num_annotators=2, num_classes=C)
    assert MajorityVote(C, 2).targets(annotations).argmax(-1).tolist() == [1, 0, 1]


def test_weights_are_votes():
    annotations = Annotations(
        [0, 3], [0, 1, 2], [0, 0, 1], num_annotators=3, num_classes=C, weight=torch.tensor([1.0, 1.0, 3.0])
    )
    assert MajorityVote(C, 3).targets(annotations).tolist() == [[0, 1, 0]]
    assert_close(SoftMajorityVote(C, 3).targets(annotations), torch.tensor([[0.4, 0.6, 0.0]]))


@pytest.mark.parametrize("cls", [MajorityVote, SoftMajorityVote])
def test_unlabelled_items_contribute_nothing(cls):
    logits = logits_of(dtype=torch.float32)
    logits[1] = math.nan  # the item without labels
    logits.requires_grad_()
    loss = cls(C, R)(logits, batch())
    assert_close(loss, cls(C, R)(logits.detach()[[0, 2, 3]], batch()[[0, 2, 3]]))


def test_majority_points_to_the_empirical_confusion():
    assert not MajorityVote.models_annotators and CrowdLayer.models_annotators
    for method in ("confusion", "reliability"):
        with pytest.raises(RuntimeError, match="empirical_confusion"):
            getattr(MajorityVote(C, R), method)()


# CrowdLayer


def test_published_loss_is_the_sum_over_all_cells():
    logits = logits_of()
    published = CrowdLayer(C, R, reduction="sum").double()(logits, batch()) / (4 * R)
    ours = CrowdLayer(C, R).double()(logits, batch())
    assert_close(published, ours * 6 / (4 * R))


@pytest.mark.parametrize("variant", ["VW", "VB", "VW+B"])
def test_vector_variants_build_nothing_larger_than_annotations_times_classes(variant):
    classes, items = 40, 30
    labels = torch.randint(0, classes, (items * 3,)).tolist()
    annotations = Annotations(
        [3 * i for i in range(items + 1)], [0, 1, 2] * items, labels, num_annotators=3, num_classes=classes
    )
    objective = CrowdLayer(classes, 3, variant=variant)
    logits = torch.randn(items, classes, requires_grad=True)
    with Largest() as largest:
        objective(logits, annotations).backward()
    assert largest.elements <= annotations.num_annotations * classes


# Trace


def test_trace_equals_a_hand_written_formula_with_a_thousand_annotators():
    annotators = 1000
    objective = TraceRegularized(C, annotators, trace_weight=0.25).double()
    start = math.log1p(math.e) / (math.log1p(math.e) + 2 * math.log1p(math.exp(-5)))
    one = Annotations([0, 1], [7], [1], num_annotators=annotators, num_classes=C)
    assert objective.penalty(one).item() == pytest.approx(0.25 * 3 * start)
    perturbed(objective)
    rho = objective.annotators.weight  # [R, observed, true]
    positive = torch.log(1 + rho.exp())
    traces = sum(positive[:, k, k] / positive[:, :, k].sum(1) for k in range(C))
    assert_close(objective.penalty(one), 0.25 * traces.sum() / annotators)


def test_the_papers_loss_and_that_of_the_authors():
    """Equation 4 is a sum with the traces' sum; the code averages over items beside the mean trace."""
    logits, labels = logits_of(3), batch()[[0, 2, 3]]
    losses = {
        (reduction, weight): perturbed(TraceRegularized(C, R, reduction=reduction, trace_weight=weight))
        for reduction, weight in (("per_item", 0.3), ("sum", 0.9), ("sum", 0.3 * R), ("per_item", 0.3 * R / 3))
    }
    found = {key: objective(logits, labels) for key, objective in losses.items()}
    one = losses["per_item", 0.3]
    p, matrices = logits.softmax(1), one.annotators.probs()
    pairs = [(i, r, y) for i, rows in enumerate([(0, 2), (2, 5), (5, 6)]) for r, y in zip(
        ANNOTATOR[slice(*rows)], LABEL[slice(*rows)], strict=True)]  # fmt: skip
    data = sum(-torch.log(p[i] @ matrices[r][:, y]) for i, r, y in pairs)
    traces = matrices.diagonal(dim1=1, dim2=2).sum(1)
    assert_close(found["per_item", 0.3].detach(), data / 3 + 0.3 * traces.mean())
    assert_close(found["sum", 0.9], 3 * found["per_item", 0.3])  # the weight times the items
    assert_close(found["sum", 0.3 * R].detach(), data + 0.3 * traces.sum())  # equation 4
    assert_close(3 * found["per_item", 0.3 * R / 3], found["sum", 0.3 * R])


def test_gradient_lowers_the_trace_and_warm_up_raises_it():
    certain = torch.zeros(4, C)  # says nothing about the confusion of a start that is symmetric
    traces = {}
    for warmup in (0, 2):
        objective = TraceRegularized(C, R, trace_weight=50.0, warmup_epochs=warmup)
        before = objective.annotators.traces().mean().item()
        objective.on_epoch_start(0)
        objective(certain, batch()).backward()
        with torch.no_grad():
            objective.annotators.weight -= 0.5 * objective.annotators.weight.grad
        traces[warmup] = objective.annotators.traces().mean().item() - before
    assert traces[0] < -1e-3 and traces[2] > 1e-5


@pytest.mark.parametrize("scope", ["all", "batch"])
def test_rectangular_trace_counts_the_diagonal_cells(scope):
    objective = perturbed(TraceRegularized(C, R, num_labels=2, scope=scope, trace_weight=1.0))
    everyone = Annotations([0, 2, 4], [0, 1, 2, 3], [0, 1, 1, 0], num_annotators=R, num_classes=2)
    expected = objective.confusion().diagonal(dim1=1, dim2=2).sum(-1).mean()
    assert_close(objective.penalty(everyone).detach(), expected)


def test_warm_up_follows_the_epoch():
    objective = TraceRegularized(C, R, trace_weight=1.0, warmup_epochs=2)
    with pytest.raises(RuntimeError, match="on_epoch_start"):
        objective(logits_of(dtype=torch.float32), batch())
    signs = []
    for epoch in range(4):
        objective.on_epoch_start(epoch)
        signs.append(math.copysign(1, objective.penalty(batch()).item()))
    assert signs == [-1, -1, 1, 1]
    assert TraceRegularized(C, R, warmup_epochs=2).eval().penalty(batch()) > 0


def test_batch_scope_touches_only_the_batch():
    objective = perturbed(TraceRegularized(C, R, scope="batch", trace_weight=1.0))
    objective.penalty(batch()).backward()
    touched = objective.annotators.weight.grad.abs().amax((1, 2)) > 0
    assert touched.tolist() == [True, True, True, False]
    few = Annotations([0, 3], [3, 3, 3], [0, 1, 1], num_annotators=R, num_classes=C)
    assert_close(objective.penalty(few), objective.annotators.traces()[3])


def test_batch_scope_does_not_grow_with_the_number_of_annotators():
    objective = TraceRegularized(C, 100_000, scope="batch")
    few = Annotations([0, 3], [3, 99_999, 3], [0, 1, 1], num_annotators=100_000, num_classes=C)
    few.prepare()
    with torch.no_grad(), Largest() as largest:
        objective.penalty(few)
    assert largest.elements <= 3 * C * C


def test_an_extreme_confusion_stays_finite():
    objective = TraceRegularized(C, R)
    with torch.no_grad():
        objective.annotators.weight.fill_(-500.0).diagonal(dim1=1, dim2=2).fill_(300.0)
    logits = (1e3 * torch.eye(C))[[0, 1, 2, 0]].requires_grad_()
    loss = objective(logits, batch())
    loss.backward()
    assert math.isfinite(loss.item()) and logits.grad.isfinite().all()
    assert objective.annotators.weight.grad.isfinite().all()
    assert objective.confusion().isfinite().all()


# Planted crowds


@pytest.mark.parametrize("name", ["crowd-layer MW", "trace"])
def test_recovers_planted_confusions_and_beats_majority_vote(name):
    x, truth = blobs()
    confusion = planted()
    annotations = annotate(truth, confusion, 5)
    objective = MAKERS[name](C, len(confusion))
    classifier = fit(objective, x, annotations)
    test_x, test_truth = blobs(seed=5)

    def accuracy(model: nn.Module) -> float:
        return (model(test_x).argmax(-1) == test_truth).float().mean().item()

    assert accuracy(classifier) > 0.95
    assert accuracy(classifier) > accuracy(fit(MajorityVote(C, len(confusion)), x, annotations)) + 0.2
    estimate = objective.confusion()
    error = (estimate - confusion).pow(2).mean().item()
    transposed = (estimate.transpose(1, 2) - confusion).pow(2).mean().item()
    assert error < (0.01 if name == "crowd-layer MW" else 0.003)
    assert transposed > 5 * error
    reliability = confusion.diagonal(dim1=1, dim2=2).mean(-1)
    assert torch.corrcoef(torch.stack([objective.reliability(), reliability]))[0, 1] > 0.97
    found = objective.posterior(classifier(x), annotations).argmax(-1)
    assert (found == truth).float().mean() > 0.95


@pytest.mark.quick(1)
@pytest.mark.parametrize("variant", ["VW", "VB", "VW+B"])
def test_vector_variants_rank_annotators_and_beat_majority_vote(variant):
    x, truth = blobs()
    confusion = planted()
    annotations = annotate(truth, confusion, 5)
    objective = CrowdLayer(C, len(confusion), variant=variant)
    classifier = fit(objective, x, annotations)
    test_x, test_truth = blobs(seed=5)
    ours = (classifier(test_x).argmax(-1) == test_truth).float().mean()
    majority = fit(MajorityVote(C, len(confusion)), x, annotations)
    assert ours > (majority(test_x).argmax(-1) == test_truth).float().mean() + 0.2
    if variant != "VB":  # a bias alone says which label an annotator prefers, not how reliable they are
        reliability = confusion.diagonal(dim1=1, dim2=2).mean(-1)
        assert torch.corrcoef(torch.stack([objective.reliability(), reliability]))[0, 1] > 0.8


def test_soft_vote_learns_from_a_good_crowd():
    x, truth = blobs()
    annotations = annotate(truth, planted()[:4], 3)
    classifier = fit(SoftMajorityVote(C, 4), x, annotations)
    assert (classifier(x).argmax(-1) == truth).float().mean() > 0.95


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", MAKERS)
def test_unanimous_votes_are_never_predicted_as_another_class(name):
    x, truth = blobs(300)
    unanimous = annotate(truth, torch.eye(C).expand(5, C, C), 3)
    objective = MAKERS[name](C, 5)
    classifier = fit(objective, x, unanimous, steps=150)
    assert (classifier(x).argmax(-1) == truth).float().mean() > 0.98
    if objective.models_annotators:
        assert (objective.posterior(classifier(x), unanimous).argmax(-1) == truth).all()
        assert (objective.confusion().argmax(-1) == torch.arange(C)).all()


# What a method may add


class Featured(Objective):
    """What the base must carry for CoNAL: features, a penalty, an own link."""

    name = "featured"
    needs_features = True

    def __init__(self, num_classes: int, num_annotators: int, dim: int, **kwargs) -> None:
        super().__init__(num_classes, num_annotators, **kwargs)
        self.linear = nn.Linear(dim, num_classes)

    def penalty(self, annotations):
        return 0.1 * self.linear.weight.norm()

    def confusion(self):
        return torch.eye(self.num_classes).expand(self.num_annotators, -1, -1).clone()

    def _loss(self, batch):
        scores = (batch.logits + self.linear(batch.features))[batch.annotations.item]
        return F.cross_entropy(scores, batch.annotations.label, reduction=batch.reduction)


def test_features_and_penalty_reach_the_method():
    objective = Featured(C, R, 5)
    logits, features = logits_of(dtype=torch.float32), torch.randn(4, 5)
    expected = F.cross_entropy((logits + objective.linear(features))[batch().item], batch().label)
    assert_close(objective(logits, batch(), features), expected + 0.1 * objective.linear.weight.norm())
    assert Featured(C, R, 5, reduction="none")(logits, batch(), features).shape == (6,)
    for wrong in (None, features[:2]):
        with pytest.raises(ValueError, match="features is .* but Featured needs"):
            objective(logits, batch(), wrong)


def test_registry():
    assert {"majority-vote", "soft-majority-vote", "crowd-layer", "trace"} < set(OBJECTIVES)
    assert all(cls.name == name for name, cls in OBJECTIVES.items())
    objective = create("crowd-layer", num_classes=C, num_annotators=R, variant="VW", reduction="sum")
    assert isinstance(objective, CrowdLayer) and objective.variant == "VW" and objective.reduction == "sum"
    with pytest.raises(ValueError, match="'conal-x' is unknown: use one of cmm, conal"):
        create("conal-x", num_classes=C, num_annotators=R)
    with pytest.raises(ValueError, match="no option 'soft'.*variant"):
        create("crowd-layer", num_classes=C, num_annotators=R, soft=True)
