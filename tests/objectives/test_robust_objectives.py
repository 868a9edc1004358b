"""Soft bootstrapping, one confusion for all, GeoCrowdNet: by the book, and on crowds that they are made for."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from support.compare import assert_close
from support.planted import annotate, blobs, fit, planted
from support.small_crowd import ANNOTATOR, INDPTR, LABEL, C, R, batch, logits_of, perturbed
from torch import Tensor

from crowdnal.data import Annotations
from crowdnal.objectives import GeoCrowdNet, MajorityVote, SingleConfusion, SoftBootstrap, SoftMajorityVote
from crowdnal.objectives.geocrowdnet import log_det

ITEM = [0, 0, 2, 2, 2, 3]
VOTES = {
    "soft-bootstrap": SoftBootstrap,
    "soft-bootstrap soft": partial(SoftBootstrap, soft=True, beta=0.6),
}
SINGLE = {
    "single": SingleConfusion,
    "single frobenius": partial(SingleConfusion, regularizer="frobenius", normalization="softmax", penalty_weight=0.3),
}
GEO = {
    "F": partial(GeoCrowdNet, volume_weight=0.01),
    "W": partial(GeoCrowdNet, volume="W", volume_weight=0.3),
    "W batch": partial(GeoCrowdNet, volume="W", scope="batch", volume_weight=0.3, normalization="softplus"),
}
MAKERS = {**VOTES, **SINGLE, **GEO}


def data_term(logits: Tensor, matrices: Tensor, weight: list[float], reduction: str) -> Tensor:
    """The mixture link, one annotation at a time."""
    p = torch.softmax(logits, 1)
    terms = torch.stack(
        [w * -torch.log(p[i] @ matrices[r][:, y]) for i, r, y, w in zip(ITEM, ANNOTATOR, LABEL, weight, strict=True)]
    )
    if reduction == "mean":
        return terms.sum() / sum(weight)
    if reduction == "item_mean":
        spans = [(INDPTR[i], INDPTR[i + 1]) for i in (0, 2, 3)]
        return torch.stack([terms[a:b].sum() / sum(weight[a:b]) for a, b in spans]).mean()
    return terms.sum() if reduction == "sum" else terms


def stochastic(stored: Tensor, normalization: str) -> Tensor:
    """[R, true, observed] of what is stored, observed label outermost."""
    positive = stored.exp() if normalization == "softmax" else torch.log1p(stored.exp())
    return (positive / positive.sum(1, keepdim=True)).transpose(1, 2)


def compare(objective, logits: Tensor, weighted: bool, by_the_book) -> None:
    annotations = batch(weighted)
    weight = [1.0] * 6 if annotations.weight is None else annotations.weight.tolist()
    inputs = [logits.requires_grad_(), *objective.parameters()]
    ours, expected = objective(logits, annotations), by_the_book(weight)
    assert_close(ours, expected)
    upstream = torch.arange(1, 1 + ours.numel(), dtype=torch.float64).view(ours.shape) * 0.7
    wanted = torch.autograd.grad(expected, inputs, upstream, materialize_grads=True)
    assert_close(torch.autograd.grad(ours, inputs, upstream), wanted)


# Soft bootstrapping


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "item_mean", "sum", "none"])
@pytest.mark.parametrize("soft", [True, False])
def test_bootstrap_by_the_book(soft, reduction, weighted):
    objective, logits = SoftBootstrap(C, R, soft=soft, beta=0.7, reduction=reduction), logits_of()

    def by_the_book(weight: list[float]) -> Tensor:
        losses = [logits.new_zeros(())] * 4
        for i in (0, 2, 3):
            votes = torch.zeros(C, dtype=torch.float64)
            for n in range(INDPTR[i], INDPTR[i + 1]):
                votes[LABEL[n]] += weight[n]
            vote = votes / votes.sum() if soft else torch.eye(C, dtype=torch.float64)[votes.argmax()]
            p = torch.softmax(logits[i], 0)
            losses[i] = -sum((0.7 * vote[k] + 0.3 * p[k]) * torch.log(p[k]) for k in range(C))
        total = torch.stack(losses)
        return {"none": total, "sum": total.sum()}.get(reduction, total.sum() / 3)

    compare(objective, logits, weighted, by_the_book)


def test_bootstrap_is_a_lighter_vote_beside_entropy():
    logits, p = logits_of(), logits_of().softmax(1)
    annotations = batch()
    entropy = -(p * p.log()).sum(1)[[0, 2, 3]].mean()
    for soft, plain in ((False, MajorityVote), (True, SoftMajorityVote)):
        vote = plain(C, R)(logits, annotations)
        assert_close(SoftBootstrap(C, R, beta=0.8, soft=soft)(logits, annotations), 0.8 * vote + 0.2 * entropy)
        assert_close(SoftBootstrap(C, R, beta=1, soft=soft)(logits, annotations), vote)
    assert_close(SoftBootstrap(C, R, beta=1)(logits, annotations), MajorityVote(C, R)(logits, annotations))


@pytest.mark.parametrize("beta", [0.5, 0.95])
def test_bootstrap_ignores_unlabelled_items_and_survives_impossible_classes(beta):
    logits = logits_of(dtype=torch.float32)
    expected = SoftBootstrap(C, R, beta=beta)(logits[[0, 2, 3]], batch()[[0, 2, 3]])
    logits[1] = math.nan
    assert_close(SoftBootstrap(C, R, beta=beta)(logits, batch()), expected)
    certain = torch.tensor([[-math.inf, 0.0, 0.0]])
    one = Annotations([0, 1], [0], [1], num_annotators=1, num_classes=C)
    assert SoftBootstrap(C, 1, beta=beta)(certain, one).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("beta", [0, -0.1, 1.1, math.nan])
def test_bootstrap_errors(beta):
    with pytest.raises(ValueError, match="beta="):
        SoftBootstrap(C, R, beta=beta)
    with pytest.raises(ValueError, match="num_labels=2 differs"):
        SoftBootstrap(C, R, num_labels=2)


def test_bootstrap_learns_from_a_good_crowd_more_certainly_than_the_vote():
    x, truth = blobs()
    annotations = annotate(truth, planted()[:4], 3)
    sharp, plain = (
        fit(cls(C, 4), x, annotations) for cls in (partial(SoftBootstrap, beta=0.7, soft=True), SoftMajorityVote)
    )
    assert (sharp(x).argmax(-1) == truth).float().mean() > 0.95
    assert sharp(x).softmax(-1).amax(-1).mean() > plain(x).softmax(-1).amax(-1).mean() + 0.05


# One confusion for all


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "item_mean", "sum", "none"])
@pytest.mark.parametrize("name", SINGLE)
def test_single_confusion_by_the_book(name, reduction, weighted):
    objective, logits = perturbed(SINGLE[name](C, R, reduction=reduction)), logits_of()

    def by_the_book(weight: list[float]) -> Tensor:
        (matrix,) = stochastic(objective.annotators.weight, objective.annotators.normalization)
        loss = data_term(logits, matrix.expand(R, C, C), weight, reduction)
        if reduction == "none":
            return loss
        return loss + (0.3 * matrix.pow(2).sum() if "frobenius" in name else 0.01 * torch.trace(matrix))

    compare(objective, logits, weighted, by_the_book)


def test_single_confusion_is_everyones():
    objective = perturbed(SingleConfusion(C, R))
    assert sum(p.numel() for p in objective.parameters()) == C * C
    confusion = objective.confusion()
    assert confusion.shape == (R, C, C) and torch.equal(confusion[0], confusion[3])
    saved = objective.state_dict()
    fresh = SingleConfusion(C, R).double()
    fresh.load_state_dict(saved)
    assert torch.equal(fresh.confusion(), confusion)
    start = math.log1p(math.e) / (math.log1p(math.e) + 2 * math.log1p(math.exp(-5)))
    assert SingleConfusion(C, R).reliability().tolist() == pytest.approx([start] * R)


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("labels", [2, 5])
def test_single_confusion_of_another_label_set(name, labels):
    objective = SINGLE[name](C, R, num_labels=labels)
    some = Annotations([0, 2], [0, 1], [1, labels - 1], num_annotators=R, num_classes=labels)
    logits = torch.randn(1, C, requires_grad=True)
    objective(logits, some).backward()
    assert logits.grad.abs().sum() > 0 and objective.confusion().shape == (R, C, labels)
    assert objective.posterior(logits, some).shape == (1, C)


@pytest.mark.parametrize("option", ["penalty_weight", "regularizer", "normalization"])
def test_single_confusion_errors(option):
    with pytest.raises(ValueError, match=f"{option}="):
        SingleConfusion(C, R, **{option: -1 if option == "penalty_weight" else "nonsense"})
    with pytest.raises(ValueError, match="num_annotators=0"):
        SingleConfusion(C, 0)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", SINGLE)
def test_single_confusion_undoes_a_bias_that_all_share(name):
    """Everyone calls many of class 0 class 1: votes move the boundary between overlapping classes, A moves it back."""
    shared = torch.tensor([[0.55, 0.43, 0.02], [0.03, 0.94, 0.03], [0.02, 0.05, 0.93]])
    x, truth = blobs(2000)
    spread = 0.6 * torch.randn(x.shape, generator=torch.Generator().manual_seed(9))
    annotations = annotate(truth, shared.expand(6, C, C), 1)
    kwargs = {} if name == "single" else {"penalty_weight": 0.01}
    objective = SINGLE[name](C, 6, **kwargs)
    ours, votes = (fit(o, x + spread, annotations, steps=400) for o in (objective, MajorityVote(C, 6)))
    test_x, test_truth = blobs(2000, seed=5)
    test_x = test_x + 0.6 * torch.randn(test_x.shape, generator=torch.Generator().manual_seed(8))
    accuracies = [(c(test_x).argmax(-1) == test_truth).float().mean().item() for c in (ours, votes)]
    assert accuracies[0] > accuracies[1] + 0.02
    error = (objective.confusion() - shared).abs().max()
    assert error < 0.08
    both = torch.stack([objective.confusion()[0].flatten(), shared.flatten()])
    assert torch.corrcoef(both)[0, 1] > 0.99


# GeoCrowdNet


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "item_mean", "sum", "none"])
@pytest.mark.parametrize("name", GEO)
def test_geocrowdnet_by_the_book(name, reduction, weighted):
    objective, logits = perturbed(GEO[name](C, R, reduction=reduction)), logits_of()

    def by_the_book(weight: list[float]) -> Tensor:
        matrices = stochastic(objective.annotators.weight, objective.annotators.normalization)
        loss = data_term(logits, matrices, weight, reduction)
        if reduction == "none":
            return loss
        if name == "F":
            f = torch.softmax(logits, 1)[[0, 2, 3]].T  # [C, items that have labels]
            return loss - 0.01 * torch.logdet(f @ f.T / 3)
        chosen = range(R) if name == "W" else (0, 1, 2)
        stacked = torch.cat([matrices[r].T for r in chosen])  # [annotators x observed, true]
        return loss - 0.3 * torch.logdet(stacked.T @ stacked / len(chosen))

    compare(objective, logits, weighted, by_the_book)


def test_volume_is_maximised():
    logits = logits_of().requires_grad_()
    for name in ("F", "W"):
        objective = perturbed(GEO[name](C, R, volume_weight=50.0))
        logits.grad = None
        objective(logits, batch()).backward()
        weight = objective.annotators.weight

        def volume(logits: Tensor, weight: Tensor, name: str = name) -> Tensor:
            f = logits.softmax(1)[[0, 2, 3]] if name == "F" else weight.softmax(1).flatten(0, 1)
            return torch.logdet(f.T @ f)

        now = volume(logits, weight)
        assert volume(logits - 1e-4 * logits.grad, weight - 1e-4 * weight.grad) > now


def test_a_volume_that_is_not_there_is_left_out():
    objective, free = (GeoCrowdNet(C, R, volume_weight=w) for w in (0.1, 0.0))
    for logits, some in (
        (logits_of(2, torch.float32), batch()[[0, 2]]),  # fewer items than classes
        (torch.zeros(4, C), batch()),  # all predictions alike
        (torch.full((4, C), 1e3).fill_diagonal_(-1e3), batch()[[1, 1, 1, 1]]),  # no labels
    ):
        logits.requires_grad_()
        grads = []
        for o in (objective, free):
            loss = o(logits, some)
            grads.append([loss, *torch.autograd.grad(loss, [logits, *o.parameters()], allow_unused=True)])
        assert_close(grads[0], grads[1])
        assert grads[0][1].isfinite().all()


@pytest.mark.parametrize("size", [1, 4])
def test_log_det(size):
    root = torch.randn(size, size + 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gram = (root @ root.T).requires_grad_()
    assert_close(log_det(gram), torch.logdet(gram))
    assert torch.autograd.gradcheck(lambda m: log_det(m + m.T), gram.detach().requires_grad_())
    for bad in (torch.zeros(size, size), -torch.eye(size), torch.full((size, size), math.nan)):
        bad.requires_grad_()
        value = log_det(bad)
        value.backward()
        assert value.item() == 0 and torch.equal(bad.grad, torch.zeros(size, size))


@pytest.mark.parametrize("volume", ["F", "W"])
@pytest.mark.parametrize("labels", [2, 5])
def test_geocrowdnet_of_another_label_set(volume, labels):
    objective = perturbed(GeoCrowdNet(C, R, num_labels=labels, volume=volume), torch.float32)
    some = Annotations([0, 2, 3, 4], [0, 1, 1, 2], [1, labels - 1, 0, 1], num_annotators=R, num_classes=labels)
    logits = torch.randn(3, C, requires_grad=True)
    objective(logits, some).backward()
    assert logits.grad.abs().sum() > 0 and objective.confusion().shape == (R, C, labels)


@pytest.mark.parametrize("option", ["volume", "volume_weight", "scope", "normalization"])
def test_geocrowdnet_errors(option):
    with pytest.raises(ValueError, match=f"{option}="):
        GeoCrowdNet(C, R, **{option: -1 if option == "volume_weight" else "nonsense"})
    with pytest.raises(ValueError, match="always 0 with 1 matrices of num_labels=2"):
        GeoCrowdNet(C, 1, num_labels=2, volume="W")


def test_batch_scope_does_not_grow_with_the_number_of_annotators():
    from support.memory import Largest

    objective = GeoCrowdNet(C, 100_000, volume="W", scope="batch")
    few = Annotations([0, 3], [3, 99_999, 3], [0, 1, 1], num_annotators=100_000, num_classes=C).prepare()
    with torch.no_grad(), Largest() as largest:
        objective.penalty(few)
    assert largest.elements <= 3 * C * C


@pytest.mark.parametrize("name", GEO)
def test_geocrowdnet_recovers_planted_confusions_and_beats_majority_vote(name):
    x, truth = blobs()
    confusion = planted()
    annotations = annotate(truth, confusion, 5)
    objective = GEO[name](C, len(confusion), volume_weight=0.01)
    classifier, votes = (fit(o, x, annotations) for o in (objective, MajorityVote(C, len(confusion))))
    test_x, test_truth = blobs(seed=5)
    accuracy, baseline = ((c(test_x).argmax(-1) == test_truth).float().mean().item() for c in (classifier, votes))
    assert accuracy > 0.95 and accuracy > baseline + 0.2
    estimate = objective.confusion()
    assert (estimate - confusion).pow(2).mean() < 0.004
    reliability = confusion.diagonal(dim1=1, dim2=2).mean(-1)
    assert torch.corrcoef(torch.stack([objective.reliability(), reliability]))[0, 1] > 0.97


# The command


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("objective", "options"),
    [
        ("soft-bootstrap", ("beta=0.8", "soft=true")),
        ("single-confusion", ("regularizer=frobenius",)),
        ("geocrowdnet", ("volume=W", "scope=batch")),
        ("geocrowdnet", ("rank=2",)),
        ("crowd-layer", ("rank=1",)),
    ],
)
def test_train(objective, options, tmp_path):
    pytest.importorskip("timm")
    from support import small_run

    root = small_run.write(tmp_path)
    small_run.go(small_run.frozen(root, tmp_path / "run", objective=objective, options=options))
    annotators = small_run.read(tmp_path / "run" / "annotators.csv")
    known = annotators.reliability[annotators.reliability != ""].astype(float)  # not of who labelled nothing
    assert len(annotators) == len(small_run.WORKERS) and len(known) == 4 and known.between(0, 1).all()
    assert small_run.read(tmp_path / "run" / "history.csv").train_loss.astype(float).map(math.isfinite).all()
