"""LIA on crowds whose confusions depend on the item, with planted annotators, label matrices, and as a command."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import assert_close
from support.lia_crowds import EASY, HARD, SKILL, C, D, R, fit, problem
from torch import Tensor, nn

import crowdnal
from crowdnal import LIA, Annotations
from crowdnal.metrics import confusion_error


def test_finds_truth_confusions_and_who_is_hard_to_label() -> None:
    x, truth, hard, annotations = problem()
    torch.manual_seed(0)
    objective = LIA(C, R, feature_dim=D, rounds=5, epochs_per_round=10)
    start = objective.confusion()
    callback = fit(objective, x, annotations, 51)
    logits, features = callback.predict()

    def right(labels: Tensor) -> float:
        return (labels == truth).float().mean().item()

    majority, dawid_skene = right(annotations.votes().argmax(1)), right(crowdnal.dawid_skene(annotations).labels)
    found = right(objective.posterior(logits, annotations, features).argmax(1))
    assert found > max(majority, dawid_skene) + 0.1 and right(logits.argmax(1)) > 0.85
    true = EASY * (~hard).float().mean() + HARD * hard.float().mean()
    error = confusion_error(true, objective.confusion())
    reliability = true.diagonal(dim1=1, dim2=2).mean(-1)
    assert error < 0.025 < confusion_error(true, start) / 2
    assert torch.corrcoef(torch.stack([objective.reliability(), reliability]))[0, 1] > 0.9
    # the same labels are likelier to be right on an easy item, and the objective knows which those are
    everyone = Annotations.from_dense(truth.unsqueeze(1).expand(-1, R), num_classes=C)
    chance = objective.log_likelihood(1e4 * torch.eye(C)[truth], everyone, features).exp().view(-1, R).mean(1)
    assert chance[~hard].mean() > chance[hard].mean() + 0.1
    assert callback.history[-1].log_likelihood > callback.history[0].log_likelihood


@pytest.mark.parametrize("use_prior", [True, False])
def test_planted_annotators_are_the_best_and_the_worst(use_prior: bool) -> None:
    x, truth, _, annotations = problem(800, seed=3)
    dense = torch.full((800, R + 2), -1)
    dense[:, :R] = annotations.to_dense()
    dense[:, R], dense[:, R + 1] = truth, (truth + 1) % C
    annotations = Annotations.from_dense(dense, num_classes=C)
    torch.manual_seed(0)
    objective = LIA(C, R + 2, feature_dim=D, rounds=5, epochs_per_round=10, use_prior=use_prior)
    fit(objective, x, annotations, 60)
    reliability = objective.reliability()
    assert reliability.argmax() == R and reliability.argmin() == R + 1
    assert reliability[R] > 0.85 and reliability[R + 1] < 0.15
    assert (objective.confusion()[R + 1].argmax(1) == (torch.arange(C) + 1) % C).all()


def test_annotator_features_tell_who_is_good_before_a_label_is_seen() -> None:
    x, _, _, annotations = problem()
    people = torch.stack([(SKILL - 0.75) / 0.12, torch.randn(R, generator=torch.Generator().manual_seed(1))], 1)
    torch.manual_seed(0)
    objective = LIA(C, R, feature_dim=D, rounds=5, epochs_per_round=10, annotator_features=people)
    fit(objective, x, annotations, 60)
    new = torch.tensor([[-1.5, 0.0], [0.0, 0.0], [1.5, 0.0]])
    reliability = objective.with_annotators(new).reliability()[R:]
    assert reliability[0] + 0.05 < reliability[1] < reliability[2] - 0.03


def test_embeddings_of_items_in_place_of_features() -> None:
    x, truth, _, annotations = problem(600)
    torch.manual_seed(0)
    objective = LIA(C, R, instance="embedding", num_items=600, rounds=5, epochs_per_round=5)
    assert not objective.needs_features
    net = nn.Sequential(nn.Linear(D, 16), nn.ReLU(), nn.Linear(16, C))
    logits, features = fit(objective, x, annotations, 30, net).predict()
    assert features is None
    found = (objective.posterior(logits, annotations).argmax(1) == truth).float().mean()
    assert found > (annotations.votes().argmax(1) == truth).float().mean() + 0.1
    rows = torch.randperm(600)[:50]
    assert_close(objective.posterior(logits[rows], annotations[rows]), objective.posterior(logits, annotations)[rows])


@pytest.mark.parametrize("finetune", ["item", "annotation"])
def test_labelling_functions_of_weak_supervision(finetune: Any) -> None:
    """A label matrix with abstentions: rules that vote for one class only, one of them mostly wrong."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(2, (900,), generator=generator)
    x = torch.randn(900, 4, generator=generator) + 1.2 * (2 * truth.unsqueeze(1) - 1) * torch.tensor([1.0, 1, 0, 0])
    matrix = torch.full((900, 6), -1)
    for rule, (label, right) in enumerate([(0, 0.8), (0, 0.75), (1, 0.8), (1, 0.75), (1, 0.3), (0, 0.7)]):
        speaks = torch.where(truth == label, right, 1 - right) > torch.rand(900, generator=generator)
        matrix[speaks & (torch.rand(900, generator=generator) < 0.7), rule] = label
    annotations = Annotations.from_label_matrix(matrix, num_classes=2)
    assert (annotations.counts == 0).any()
    torch.manual_seed(0)
    objective = LIA(2, 6, feature_dim=4, rounds=5, epochs_per_round=5, finetune=finetune)
    logits, features = fit(objective, x, annotations, 40).predict()
    posterior = objective.posterior(logits, annotations, features)
    voted = annotations.counts > 0
    right = (posterior.argmax(1) == truth).float()
    assert right[voted].mean() > (annotations.votes().argmax(1) == truth)[voted].float().mean() + 0.05
    assert right[~voted].mean() > 0.8  # no rule spoke: the classifier alone
    assert_close(posterior[~voted], logits.softmax(1)[~voted])


@pytest.mark.slow
def test_crowdnal_train(tmp_path: Any) -> None:
    pytest.importorskip("timm")
    from support import small_run

    root = small_run.write(tmp_path)
    options = ("rounds=2", "epochs_per_round=2", "hidden_dim=8")
    config = small_run.frozen(root, tmp_path / "run", objective="lia", options=options, holdout=0.2, epochs=6, amp=True)
    result = small_run.go(config)
    assert len(small_run.read(tmp_path / "run" / "history.csv")) == 6
    assert [r.epoch for r in result.objective.history] == [2, 4] and result.objective.marginal
    assert result.objective.references.shape == (39, result.objective.pairs.difficulty.input_size)
    assert result.estimates.from_model and result.metrics["objective"].startswith("LIA")
