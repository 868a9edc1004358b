"""Soft labels and unlabelled items, on every objective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import assert_close
from support.objectives import CASES, Case, features_of, small
from support.small_crowd import C, R, logits_of
from torch import Tensor
from torch.nn import functional as F

from crowdnal import aggregate, dawid_skene
from crowdnal.data import Annotations
from crowdnal.objectives import Objective

EVERY = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
HARD = torch.tensor([[1, -1, 0, -1], [-1, -1, -1, -1], [-1, 2, 2, -1], [-1, 0, -1, -1]])
LINKS: dict[str, Callable[[Objective, Tensor, int], Tensor]] = {  # log-probabilities of an annotator's labels, from p
    "crowd-layer": lambda o, p, r: (p @ o.annotators.weight[r]).log_softmax(-1),
    "trace": lambda o, p, r: (p @ o.annotators.probs()[r].to(p)).log(),
    "single-confusion": lambda o, p, r: (p @ o.annotators.probs()[0].to(p)).log(),
}


def soft() -> Tensor:
    """``[B, R, C]``: who gave a label in HARD gives a distribution."""
    drawn = torch.rand(4, R, C, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    drawn[0, 0, 2] = 0.0  # a class that somebody excludes
    return (drawn / drawn.sum(-1, keepdim=True)).where((HARD >= 0).unsqueeze(-1), -1.0)


def numbered(a: Annotations) -> Annotations:
    a.item_id = torch.arange(len(a))
    return a


def outcome(case: Case, a: Annotations, **options: Any) -> list[Tensor]:
    objective = case.begun(a, **options)
    x = features_of(len(a)) if objective.needs_features else None
    given = logits_of(len(a)), a, x
    found = [objective(*given).detach(), objective.posterior(*given), objective.units(a).double()]
    return [*found, objective.confusion()] if objective.models_annotators else found


@EVERY
def test_a_certain_soft_label_is_a_label(case: Case) -> None:
    certain = F.one_hot(HARD.clamp(min=0), C).double().where((HARD >= 0).unsqueeze(-1), -1.0)
    hard = outcome(case, numbered(Annotations.from_dense(HARD, num_classes=C)))
    assert_close(outcome(case, numbered(Annotations.from_dense(certain))), hard)


@EVERY
def test_a_soft_label_is_labels_of_its_weights(case: Case) -> None:
    item, annotator, label = (soft() > 0).nonzero().unbind(1)
    indptr = torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(item, minlength=4).cumsum(0)])
    weight = soft()[item, annotator, label]
    by_hand = Annotations(indptr, annotator, label, num_annotators=R, num_classes=C, weight=weight, item_id=range(4))
    read = numbered(Annotations.from_dense(soft()))
    for name in ("indptr", "annotator", "label", "weight"):
        assert torch.equal(getattr(read, name), getattr(by_hand, name))
    objective = case.begun(read)
    x = features_of(4) if objective.needs_features else None
    assert torch.equal(objective(logits_of(4), soft(), x), objective(logits_of(4), read, x))
    if not objective.counts_items and objective.reduction == "mean" and objective.cross_entropy_with == "labels":
        assert_close(objective.units(read), torch.tensor(5.0, dtype=torch.float64))  # answers, not their parts


@pytest.mark.parametrize("name", LINKS)
def test_the_loss_is_the_cross_entropy_with_the_distribution(name: str) -> None:
    """Of the labels as the softmax and the mixture link predict them."""
    objective = CASES[name].begun(confusion_prior=None, **({"trace_weight": 0.0} if name == "trace" else {}))
    logits, given = logits_of(4).requires_grad_(), soft()
    cells = (HARD >= 0).nonzero().tolist()
    log_probs = torch.stack([LINKS[name](objective, logits[i].softmax(0), r) for i, r in cells])
    targets = torch.stack([given[i, r] for i, r in cells])
    wanted = F.kl_div(log_probs, targets, reduction="batchmean") - torch.special.xlogy(targets, targets).sum() / 5
    objective.reduction = "mean"
    penalty = objective.penalty(small())
    loss = objective(logits, given) - (0 if penalty is None else penalty)
    assert_close(loss, wanted)
    assert_close(*(torch.autograd.grad(one, logits)[0] for one in (loss, wanted)))
    smooth = CASES[name].begun(
        label_smoothing=0.2, confusion_prior=None, **({"trace_weight": 0.0} if name == "trace" else {})
    )
    wanted = -(((0.8 * targets + 0.2 / C) * log_probs).sum() / 5)
    assert_close(smooth(logits, given) - (0 if penalty is None else penalty), wanted)


def test_votes_and_em_count_its_parts() -> None:
    given = torch.tensor([[[0.9, 0.1], [0.4, 0.6]], [[0.2, 0.8], [-1.0, -1.0]], [[0.5, 0.5], [0.0, 1.0]]])
    a = Annotations.from_dense(given)
    assert_close(a.votes(), given.clamp(min=0).sum(1))
    assert_close(aggregate(a, "majority-vote").argmax(1), torch.tensor([0, 1, 1]))
    found = dawid_skene(a, max_iterations=1, confusion_prior=None, smoothing=0.0)
    parts = given.clamp(min=0)
    counts = torch.einsum("ic,irk->rck", parts.sum(1) / a.votes().sum(1, keepdim=True), parts)
    assert_close(found.confusion.float(), counts / counts.sum(-1, keepdim=True), atol=1e-5)


@EVERY
def test_items_without_labels_beside_others_change_nothing(case: Case) -> None:
    a, kept = small(weighted=True), torch.tensor([0, 2, 3])
    for reduction in ("mean", "sum", "item_mean", "per_item"):
        objective = case.begun(a, reduction=reduction)
        x = features_of(4) if objective.needs_features else None
        logits = logits_of(4)
        logits[1] = torch.tensor([torch.inf, torch.nan, 0.0])
        alone = objective(logits[kept], a[kept], None if x is None else x[kept])
        assert_close(objective(logits, a, x), alone, where=reduction)
        assert objective.units(a) == objective.units(a[kept])


@EVERY
def test_all_of_it_at_once(case: Case) -> None:
    """Soft labels, an item without any, class weights, smoothing, focal terms and a known class."""
    options = {"class_weight": [0.5, 2.0, 1.0], "label_smoothing": 0.1, "focal": 2.0}
    kind = case.fresh().cross_entropy_with
    given = {name: options[name] for name in options if kind is not None}
    if case.options.get("incremental"):
        del given["class_weight"]
    objective = case.begun(numbered(Annotations.from_dense(soft())), **given)
    objective.set_gold(torch.tensor([-1, 2, -1, -1]))
    logits = logits_of(4).requires_grad_()
    loss = objective(logits, soft(), features_of(4) if objective.needs_features else None)
    loss.backward()
    assert loss.isfinite() and logits.grad is not None and logits.grad.isfinite().all()
