"""DL-EM, MBEM and what aggregates first, then trains: rounds against numpy, likelihoods that rise, recovered crowds."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.attached import labels, mlp
from support.compare import assert_close
from support.crowds import simulated
from support.planted import annotate, blobs, planted
from support.small_crowd import C, R, batch, logits_of
from torch import Tensor, nn

import crowdnal
from crowdnal import (
    DLDS,
    DLEM,
    DLWC,
    MBEM,
    Annotations,
    DLAggregate,
    dawid_skene,
    metrics,
    one_coin,
    worker_clustering,
)
from crowdnal.objectives import Objective, Round

STORED: dict[str, Callable[..., Any]] = {
    "dl-em": DLEM,
    "mbem": MBEM,
    "dl-ds": DLDS,
    "dl-ds hard one-coin": partial(DLDS, soft=False, one_coin=True),
    "dl-wc": partial(DLWC, num_clusters=1),
    "dl-aggregate": DLAggregate,
}


def rows_of(a: Annotations) -> list[tuple[int, int, int, float]]:
    weight = torch.ones(a.num_annotations) if a.weight is None else a.weight
    return list(zip(a.item.tolist(), a.annotator.tolist(), a.label.tolist(), weight.tolist(), strict=True))


def counted(a: Annotations, q: np.ndarray, pseudo: float | np.ndarray) -> np.ndarray:
    counts = np.zeros((a.num_annotators, q.shape[1], a.num_classes)) + pseudo
    for i, r, y, w in rows_of(a):
        counts[r, :, y] += w * q[i]
    return counts / counts.sum(2, keepdims=True)


def expected(a: Annotations, prior: np.ndarray, confusion: np.ndarray) -> tuple[np.ndarray, float]:
    joint = np.array(prior)
    for i, r, y, w in rows_of(a):
        joint[i] *= confusion[r, :, y] ** w
    return joint / joint.sum(1, keepdims=True), float(np.log(joint.sum(1)).sum())


def crowd() -> tuple[Annotations, np.ndarray, np.ndarray]:
    """Weighted annotations of 12 items (the last one without any), their votes, and a classifier's probabilities."""
    full, _, _ = simulated(3, 5, 12)
    a = full.select(full.item != 11)
    a.weight = torch.linspace(0.5, 2, a.num_annotations, dtype=torch.double)
    votes = a.votes().numpy()
    votes[11] = 1
    logits = np.random.default_rng(0).normal(size=(12, 3))
    p = np.exp(logits)
    return a, votes / votes.sum(1, keepdims=True), p / p.sum(1, keepdims=True)


# Rounds by hand


@pytest.mark.parametrize("known", [False, True])
def test_two_rounds_of_dl_em_by_hand(known: bool) -> None:
    a, q, p = crowd()
    gold = torch.full((12,), -1)
    if known:
        gold[[0, 4, 11]] = torch.tensor([2, 1, 0])
    allowed = (gold.numpy()[:, None] < 0) | (gold.numpy()[:, None] == np.arange(3))
    q = np.where(gold.numpy()[:, None] >= 0, allowed, q)
    prior = torch.rand(3, 3, generator=torch.Generator().manual_seed(0)).double()
    objective = DLEM(3, 5, smoothing=0.2, gold=gold if known else None, confusion_prior=prior).double()
    objective.on_train_start(a, lambda: (torch.from_numpy(np.log(p)), None))
    confusion = counted(a, q, prior.numpy() + 0.2)
    assert_close(objective.targets, q)
    assert_close(objective.confusion(), confusion)
    for epoch in (1, 2):
        objective.on_epoch_start(epoch)
        q, likelihood = expected(a, np.where(allowed, p, 0), confusion)
        confusion = counted(a, q, prior.numpy() + 0.2)
        assert_close(objective.targets, q, atol=1e-12)
        assert_close(objective.confusion(), confusion)
        assert objective.history[-1][:2] == (epoch, epoch)
        assert objective.history[-1].log_likelihood == pytest.approx(likelihood)
    logits = logits_of(12)
    each = -(torch.from_numpy(q) * logits.log_softmax(1)).sum(1)
    informed = torch.ones(12, dtype=torch.bool)
    informed[11] = known  # no labels: it counts only where its class is known
    assert_close(objective(logits, a), each[informed].mean())
    logits.requires_grad_()
    objective(logits, a).backward()
    grad = (logits.detach().softmax(1) - torch.from_numpy(q)) * informed.unsqueeze(1) / informed.sum()
    assert_close(logits.grad, grad)


@pytest.mark.parametrize("soft", [False, True])
def test_a_round_of_mbem_by_hand(soft: bool) -> None:
    a, _, p = crowd()
    gold = torch.full((12,), -1)
    gold[3] = 2
    objective = MBEM(3, 5, smoothing=0.2, gold=gold, soft=soft, epochs_per_round=2, confusion_prior=None).double()
    objective.on_train_start(a, lambda: (torch.from_numpy(np.log(p)), None))
    objective.on_epoch_start(1)
    assert objective.history == []
    objective.on_epoch_start(2)
    predicted = p if soft else np.eye(3)[p.argmax(1)]
    predicted = np.array(predicted)
    predicted[3] = [0, 0, 1]
    confusion, prior = counted(a, predicted, 0.2), predicted[:11].sum(0)
    prior = np.tile(prior / prior.sum(), (12, 1))
    prior[3, :2] = 0
    q, likelihood = expected(a, prior, confusion)
    assert_close(objective.confusion(), confusion)
    assert_close(objective.targets, q, atol=1e-9)
    joint = likelihood - np.log(prior[11].sum())  # the item without labels says nothing
    assert objective.history[-1].log_likelihood == pytest.approx(joint)


def test_start_and_held_confusions_and_other_label_sets() -> None:
    a, _, _ = crowd()
    start = torch.rand(5, 2, 3, generator=torch.Generator().manual_seed(0)).double().softmax(2)
    objective = DLEM(2, 5, num_labels=3, initial_confusion=start, smoothing=0.1).double()
    assert_close(objective.confusion(), start, rtol=1e-6, atol=1e-6)
    objective.on_train_start(a, lambda: (torch.zeros(12, 2), None))
    q, _ = expected(a, np.full((12, 2), 0.5), objective.initial.exp().transpose(1, 2).numpy())
    assert_close(objective.targets, q, rtol=1e-6)
    assert_close(objective.confusion(), counted(a, q, 0.1), rtol=1e-6)
    objective.on_epoch_start(1)
    assert objective(torch.zeros(12, 2), a).item() == pytest.approx(math.log(2))
    held = DLEM(3, 5, confusion_prior=1e9 * torch.eye(3).double().roll(1, 1)).double()
    held.on_train_start(a)
    assert_close(held.confusion(), torch.eye(3).roll(1, 1).double().expand(5, 3, 3), atol=1e-6, rtol=0)
    for cls in (DLEM, MBEM, DLDS, DLWC, DLAggregate):
        with pytest.raises(ValueError, match=f"num_labels=2 differs from num_classes=3, which {cls.__name__} without"):
            cls(3, 5, num_labels=2)


# Exact EM


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_with_a_class_prior_for_a_classifier_it_is_dawid_skene(smoothing: float) -> None:
    """The M-step of a classifier that sees nothing is the mean of the targets, exactly."""
    a, _, _ = simulated(3, 10, 200)
    objective = DLEM(3, 10, smoothing=smoothing, confusion_prior=None).double()
    objective.on_train_start(a, lambda: (objective.targets.mean(0).log().expand(200, 3), None))
    for epoch in range(1, 16):
        objective.on_epoch_start(epoch)
    theirs = dawid_skene(a, max_iterations=15, tolerance=-1, smoothing=smoothing, confusion_prior=None)
    assert_close(objective.targets, theirs.posterior, atol=1e-7, rtol=0)
    likelihoods = [made.log_likelihood for made in objective.history]
    assert_close(likelihoods, theirs.log_likelihood, rtol=1e-7)


def test_the_likelihood_never_decreases_with_an_m_step_that_maximises() -> None:
    """Logistic regression on features, fitted to the end in every round."""
    x, truth = blobs()
    x, truth = x[:200].double(), truth[:200]
    a = annotate(truth, planted(), 3)
    model = nn.Linear(x.shape[1], C).double()
    objective = DLEM(C, a.num_annotators, smoothing=0.0, confusion_prior=None).double()
    objective.on_train_start(a, lambda: (model(x).detach(), None))
    for epoch in range(1, 9):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

        def closure(optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = objective(model(x), a)
            loss.backward()
            return loss

        optimizer.step(closure)
        objective.on_epoch_start(epoch)
    steps = np.diff([made.log_likelihood for made in objective.history])
    assert len(steps) == 7 and (steps >= -1e-6).all() and steps[0] > 1, steps


# In the batch


def test_incremental_batches_by_hand() -> None:
    a, _, _ = crowd()
    objective = DLEM(3, 5, incremental=True, decay=0.9, smoothing=0.2).double()
    confusion = np.tile(np.exp(2 * np.eye(3)) / (np.exp(2) + 2), (5, 1, 1))
    running, rng = np.array(confusion), np.random.default_rng(1)
    for rows in (torch.tensor([3, 0, 11]), torch.tensor([5, 3, 9, 1])):
        part, logits = a[rows], torch.from_numpy(rng.normal(size=(len(rows), 3)))
        q, _ = expected(part, logits.softmax(1).numpy(), confusion)
        informed = part.counts > 0
        loss = -(torch.from_numpy(q) * logits.log_softmax(1)).sum(1)[informed].mean()
        assert_close(objective.eval()(logits, part), loss)  # no step is counted here
        assert_close(objective.train()(logits, part), loss)
        running = 0.9 * running
        for i, r, y, w in rows_of(part):
            running[r, :, y] += w * q[i]
        confusion = (running + 0.2) / (running + 0.2).sum(2, keepdims=True)
        assert_close(objective.confusion(), confusion, rtol=1e-6)
    assert objective(logits[:0], a[:0]).item() == 0
    assert_close(objective.confusion(), confusion, rtol=1e-6)
    other = DLEM(3, 5, incremental=True)
    other.load_state_dict(objective.state_dict())
    assert_close(other.running.double(), objective.running)
    gold = torch.full((12,), -1)
    gold[3] = 1
    told = DLEM(3, 5, incremental=True, gold=gold, reduction="none")
    part, logits = a[[3, 5]], torch.randn(2, 3)
    assert_close(told(logits, part)[0], -logits.log_softmax(1)[0, 1])
    with pytest.raises(ValueError, match="no item_id and 2 items, but gold has 12"):
        told(logits, Annotations([0, 1, 1], [0], [0], num_annotators=5, num_classes=3))


@pytest.mark.quick(1)
@pytest.mark.parametrize("incremental", [False, True])
def test_compiled_steps_are_eager_ones(incremental: bool) -> None:
    torch._dynamo.reset()
    a, results = labels(24), []
    for compiled in (False, True):
        model = crowdnal.attach(mlp(), DLEM(4, 6, incremental=incremental))
        model.objective.on_train_start(a, lambda: (torch.zeros(24, 4), None))
        backend = "aot_eager" if incremental else "eager"
        step: Any = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
        x = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
        losses = []
        for rows in torch.arange(24).split(9):
            loss = step(x[rows], a[rows]).loss
            loss.backward()
            losses.append(loss.detach())
        results.append([*losses, model.objective.confusion(), *(p.grad for p in model.parameters())])
    assert_close(results[1], results[0])


# Aggregate first


@pytest.mark.parametrize("soft", [True, False])
def test_targets_are_what_the_aggregation_found(soft: bool) -> None:
    a, truth, _ = simulated(3, 10, 200)
    gold = torch.where(torch.arange(200) < 20, (truth + 1) % 3, -1)
    for objective, found in (
        (DLDS(3, 10, soft=soft, smoothing=0.2, gold=gold), dawid_skene(a, smoothing=0.2, gold=gold)),
        (DLDS(3, 10, soft=soft, one_coin=True), one_coin(a)),
        (DLWC(3, 10, soft=soft, num_clusters=4), worker_clustering(a, 4)),
        (DLAggregate(3, 10, soft=soft, method="one-coin", method_options={"max_iterations": 2}),
         one_coin(a, max_iterations=2)),
    ):  # fmt: skip
        objective.on_train_start(a)
        wanted = found.posterior.float() if soft else nn.functional.one_hot(found.labels, 3).float()
        assert_close(objective.targets, wanted)
        objective.on_epoch_start(1)
        assert_close(objective.targets, wanted)
        if isinstance(objective, DLDS) and not objective.one_coin:
            assert objective.history == [Round(n + 1, 0, v) for n, v in enumerate(found.log_likelihood)]
        if isinstance(objective, DLWC):
            assert_close(objective.confusion(), found.confusion.float(), atol=1e-6, rtol=0)
            assert objective.history[-1].log_likelihood == found.objective[-1]
        else:
            smoothing = 3 * objective.smoothing  # of a row
            counted = metrics.empirical_confusion(found.posterior, a, smoothing=smoothing)
            if objective.crowd_prior is not None:
                weight = metrics.empirical_confusion(found.posterior, a, smoothing=0) * 0 + found.pseudo_counts
                given = crowdnal.functional.label_counts(found.posterior, a).transpose(1, 2) + objective.smoothing
                counted = (given + weight) / (given + weight).sum(2, keepdim=True)
            assert_close(objective.confusion(), counted.float(), atol=1e-6, rtol=0)


# What all keep


def confusion_contract(objective: Objective) -> None:
    """Rows are true classes; held-out labels and the posterior use the confusion shown; copies are copies."""
    with torch.no_grad():
        table = torch.randn(R, C, C, generator=torch.Generator().manual_seed(0), dtype=torch.double).log_softmax(1)
        objective.get_buffer("log_confusion").copy_(table)
    confusion, logits, a = objective.confusion(), logits_of(), batch()
    assert_close(confusion, table.exp().transpose(1, 2))
    rows, p = rows_of(a), logits.softmax(1)
    heldout = torch.stack([(p[i] @ confusion[r][:, y]).log() for i, r, y, _ in rows])
    assert_close(objective.log_likelihood(logits, a), heldout)
    q, _ = expected(a, p.numpy(), confusion.numpy())
    assert_close(objective.posterior(logits, a), q)
    objective.confusion().zero_()
    assert_close(objective.confusion(), confusion)
    half = objective.bfloat16().confusion()
    assert_close(half.sum(-1), torch.ones(R, C))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(DLEM, decay=1.0), "decay=1.0 must be at least 0"),
        (partial(DLEM, smoothing=-1.0), "smoothing must be finite"),
        (partial(DLEM, gold=torch.tensor([0, 3])), r"gold\[1\] is 3, outside \[0, 3\)"),
        (partial(DLEM, initial_confusion=torch.ones(R, C, C)), "initial_confusion has a row that is no distribution"),
        (partial(MBEM, confusion_prior=torch.ones(2, 2)), r"confusion_prior has shape \(2, 2\)"),
        (partial(MBEM, epochs_per_round=0), "epochs_per_round=0"),
        (partial(DLDS, max_iterations=0), "max_iterations=0"),
        (partial(DLDS, one_coin=True, confusion_prior=torch.ones(C, C)), "one_coin=True has no confusions"),
        (partial(DLWC, num_clusters=9), "num_clusters=9 must be 1 to num_annotators=4"),
        (partial(DLAggregate, method="vote"), "method='vote' is unknown"),
        (partial(DLAggregate, method_options="x"), "method_options='x' must be a mapping"),
    ],
)
def test_bad_options(make: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(C, R)
    with pytest.raises(ValueError, match=r"gold must be \[N\] integers for N = 4 items"):
        DLEM(C, R, gold=torch.zeros(3, dtype=torch.long)).on_train_start(batch())
