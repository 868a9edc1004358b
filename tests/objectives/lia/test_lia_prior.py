"""The priors on competence and difficulty of LIA and LIA-ML: formulas, batches, state, who is ranked first."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.compare import assert_close
from support.lia import FEATURES, OPTIONS, PHASES, make, plain_mlp
from support.lia_crowds import C, D, R, fit, problem
from support.lia_ml import T, crowd, features_of
from support.lia_ml import make as make_tags
from support.small_crowd import batch, logits_of, perturbed
from torch import Tensor

from crowdnal import LIA, Annotations
from crowdnal.metrics import accuracy
from crowdnal.objectives.lia.pair_em import PairEM


def plain_prior(objective: PairEM, present: list[int], tag: Tensor | None = None) -> Tensor:
    """Σ_r ‖C(r) - C(0)‖² of annotators who gave labels."""
    people, total = objective.pairs.annotators.values, torch.zeros((), dtype=torch.float64)
    extra = torch.zeros(0, dtype=torch.float64) if tag is None else tag
    for r in present:
        own, usual = (torch.cat([x, extra]) for x in (people[r], torch.zeros_like(people[r])))
        total = total + (
            (plain_mlp(objective.pairs.competence, own) - plain_mlp(objective.pairs.competence, usual)).square().sum()
        )
    return total


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", OPTIONS)
def test_joins_the_negative_log_likelihood(name: str, phase: str) -> None:
    options = {**OPTIONS[name], **PHASES[phase], "reduction": "sum"}
    plain = perturbed(make(**options, competence_precision=0.0))
    objective = perturbed(make(**options, competence_precision=0.6))
    annotations = Annotations(
        *(batch(True).indptr, batch(True).annotator, batch(True).label),
        num_annotators=objective.num_annotators, num_classes=objective.num_labels, weight=batch(True).weight,
        item_id=range(4),
    )  # fmt: skip
    for each in (plain, objective):
        each.on_train_start(annotations)
    logits, x = logits_of().requires_grad_(), FEATURES
    present = sorted(set(annotations.annotator.tolist()))
    expected = plain(logits, annotations, x) + 0.3 * plain_prior(plain, present)
    loss = objective(logits, annotations, x)
    assert_close(loss, expected)
    gradients = torch.autograd.grad(loss, list(objective.parameters()))
    assert_close(gradients, torch.autograd.grad(expected, list(plain.parameters())))
    rows = [torch.tensor([2, 1]), torch.tensor([0, 3])]  # batches add up to it, each item has its share
    parts = [objective(logits[some], annotations[some], x[some]) for some in rows]
    assert_close(sum(parts), expected)
    objective.reduction = "none"
    assert_close(objective(logits, annotations, x).sum(), expected)


def test_of_tags() -> None:
    plain = make_tags(reduction="sum", competence_precision=0.0)
    objective = make_tags(reduction="sum", competence_precision=0.6)
    for each in (plain, objective):
        each.on_train_start(crowd())
    logits = torch.zeros(4 * T, 2, dtype=torch.float64)
    x = features_of().repeat_interleave(T, 0)
    # C is linear: an annotator is as far from the others in every tag
    expected = plain(logits, crowd(), x) + 0.3 * plain_prior(plain, list(range(5)), plain.pairs.tags[0])
    assert_close(objective(logits, crowd(), x), expected)


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_difficulty_counts_once_for_each_labelled_item(reduction: Any) -> None:
    """τ/2 ‖D(x)‖², of LIA-ML with the tag beside x; nothing for items without labels."""
    annotations, x = crowd(), features_of().repeat_interleave(T, 0)
    logits = torch.zeros(4 * T, 2, dtype=torch.float64)
    plain, objective = (
        make_tags(reduction=reduction, competence_precision=0.0, difficulty_precision=tau) for tau in (0.0, 0.6)
    )
    for each in (plain, objective):
        each.on_train_start(annotations)
    sizes = torch.stack(
        [
            plain_mlp(plain.pairs.difficulty, torch.cat([x[i], plain.pairs.tags[i % T]])).square().sum()
            for i in range(4 * T)
        ]
    )
    sizes = 0.3 * sizes.where(annotations.counts > 0, 0.0)
    assert int((annotations.counts == 0).sum()) >= T
    added = {"sum": sizes.sum(), "mean": sizes.sum() / (annotations.counts > 0).sum(), "none": sizes}[reduction]
    expected, loss = plain(logits, annotations, x) + added, objective(logits, annotations, x)
    assert_close(loss, expected)
    gradients = torch.autograd.grad(loss.sum(), list(objective.pairs.difficulty.parameters()))
    assert_close(gradients, torch.autograd.grad(expected.sum(), list(plain.pairs.difficulty.parameters())))


def test_priors_are_there_once_training_has_begun() -> None:
    given = make(competence_precision=0.5, difficulty_precision=0.0)
    objective = make(competence_precision=None, difficulty_precision=None)
    assert objective._precisions == (0, 0)
    for each in (objective, given):
        each.on_train_start(batch())
    assert objective._precisions == (1.0, 0.1) and given._precisions == (0.5, 0.0)


@pytest.mark.slow
def test_hard_items_are_not_explained_away() -> None:
    """Without the prior D explains by the features what everybody takes an item for that looks like another class."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(3, (300,), generator=generator)
    x = 1.6 * torch.eye(3, 6)[truth] + torch.randn(300, 6, generator=generator)
    looks = x[:, :3].argmax(1, keepdim=True)
    seen = torch.rand(300, 5, generator=generator)
    dense = torch.where(seen < 0.5, looks, truth.unsqueeze(1))
    dense = torch.where(seen > 0.95, torch.randint(3, (300, 5), generator=generator), dense)
    annotations, right = Annotations.from_dense(dense, num_classes=3), []
    for tau in (0.0, None):
        torch.manual_seed(0)
        objective = LIA(3, 5, feature_dim=6, difficulty_precision=tau)
        fit(objective, x, annotations, 300)
        right.append(accuracy(objective.targets, truth))
    assert right[1] > right[0] + 0.03, right


def test_needs_the_training_set_and_is_told_it_anew() -> None:
    objective = make(competence_precision=1.0, rounds=0)
    logits, x = logits_of(dtype=torch.float32), FEATURES.float()
    with pytest.raises(RuntimeError, match=r"competence_precision=1.0.*on_train_start"):
        objective(logits, batch(), x)
    objective.on_train_start(batch())
    loss = objective(logits, batch(), x)
    assert "competence_precision=1.0" in repr(objective)
    fresh = make(competence_precision=1.0, rounds=0)
    fresh.load_state_dict(objective.state_dict())
    fresh.on_train_resume(batch())
    assert torch.equal(fresh(logits, batch(), x), loss)
    wider = objective.with_annotators(1)
    sizes: dict[str, Any] = {"num_annotators": objective.num_annotators + 1, "num_classes": objective.num_labels}
    later = Annotations(batch().indptr, batch().annotator, batch().label, **sizes)
    with pytest.raises(RuntimeError, match="on_train_start"):
        wider(logits, later, x)
    wider = copy.deepcopy(wider)
    wider.on_train_start(later)
    assert_close(wider(logits, later, x), loss)


def test_annotators_with_a_handful_of_labels_do_not_outrank_who_is_known_to_be_good() -> None:
    x, truth, _, annotations = problem(600, seed=3)
    few = 200  # further annotators of one label each, seven in ten right
    generator = torch.Generator().manual_seed(0)
    dense = torch.full((600, R + few + 1), -1)
    dense[:, :R] = annotations.to_dense()
    right = torch.rand(few, generator=generator) < 0.7
    item = torch.randperm(600, generator=generator)[:few]
    dense[item, R + torch.arange(few)] = torch.where(right, truth[item], (truth[item] + 1) % C)
    dense[:, -1] = truth
    annotations = Annotations.from_dense(dense, num_classes=C)
    torch.manual_seed(0)
    places, spread = [], []
    for precision in (0.0, 1.0):
        objective = LIA(C, R + few + 1, feature_dim=D, rounds=5, epochs_per_round=10, competence_precision=precision)
        fit(objective, x, annotations, 51)
        reliability = objective.reliability()
        places.append(int((reliability > reliability[-1]).sum()) + 1)
        spread.append(reliability[R:-1].std().item())
    assert places[1] == 1 and spread[1] < 0.5 * spread[0]
