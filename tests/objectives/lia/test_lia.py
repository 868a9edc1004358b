"""LIA against the formulas of its paper: confusions of pairs, both phases, rounds, options, the contract."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from support.compare import assert_close
from support.lia import FEATURES, ITEM, OPTIONS, PEOPLE, PHASES, crowd, make, plain_mlp
from support.small_crowd import ANNOTATOR, INDPTR, LABEL, C, R, batch, logits_of, perturbed
from torch import Tensor

from crowdnal import LIA
from crowdnal.data import Annotations
from crowdnal.objectives.lia import modules as lia_modules
from crowdnal.objectives.lia import pair_em as _pair_em


def plain_log_q(objective: LIA, x: Tensor) -> Tensor:
    """``[nnz, C]``: exponentials, products and sums as the paper has them, one annotation at a time."""
    pairs, rows = objective.pairs, []
    for i, r, y in zip(ITEM, ANNOTATOR, LABEL, strict=True):
        instance = x[i] if pairs.instances is None else pairs.instances[i]
        d = plain_mlp(pairs.difficulty, instance).view(pairs.shape).exp()
        c = plain_mlp(pairs.competence, pairs.annotators.values[r]).view(pairs.shape).exp()
        q = (d * c).sum(2)
        rows.append(torch.log(q[:, y] / q.sum(1)))
    return torch.stack(rows)


def plain_items(objective: LIA, logits: Tensor, x: Tensor, weight: Tensor, phase: str) -> Tensor:
    """The loss ``[4]`` of each item."""
    h, q = logits.softmax(1), plain_log_q(objective, x)
    losses = []
    for i in range(4):
        span = range(INDPTR[i], INDPTR[i + 1])
        if phase == "annotation":
            losses.append(-sum((weight[n] * torch.log((h[i] * q[n].exp()).sum()) for n in span), h.new_zeros(())))
            continue
        joint = torch.log(h[i]) + sum((weight[n] * q[n] for n in span), h.new_zeros(C))
        loss = -(objective.targets[i] * joint).sum() if phase == "em" else -torch.log(joint.exp().sum())
        losses.append(loss if len(span) else 0 * loss)
    return torch.stack(losses)


@pytest.mark.quick(8)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_equal_the_dense_formula(name: str, phase: str, weighted: bool) -> None:
    for reduction in ("mean", "item_mean", "per_item", "sum", "none"):
        objective = perturbed(make(reduction=reduction, **{**OPTIONS[name], **PHASES[phase]}))
        annotations = crowd(weighted, objective.num_labels)
        weight = annotations.weight if weighted else torch.ones(6, dtype=torch.float64)
        if phase == "em":
            objective.on_train_start(annotations)
            targets = torch.tensor([[0.2, 0.3, 0.5], [0.4, 0.6, 0.0], [0.0, 1.0, 0.0], [0.9, 0.1, 0.0]])
            objective.targets.copy_(targets)
        logits, x = logits_of().requires_grad_(), FEATURES.clone().requires_grad_()
        inputs = [logits, x, *objective.parameters()]
        plain = plain_items(objective, logits, x, weight, phase)
        plain = {"none": plain, "sum": plain.sum()}.get(reduction, plain.sum() / 3)
        ours = objective(logits, annotations, x)
        assert_close(ours, plain)
        upstream = torch.arange(1, 1 + ours.numel(), dtype=torch.float64).view(ours.shape) * 0.7
        expected = torch.autograd.grad(plain, inputs, upstream, materialize_grads=True)
        assert_close(torch.autograd.grad(ours, inputs, upstream, materialize_grads=True), expected)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("use_prior", [True, False])
def test_e_step_likelihood_and_round(use_prior: bool, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    objective, annotations = perturbed(make(use_prior=use_prior)), crowd(weighted, C)
    weight = annotations.weight if weighted else torch.ones(6, dtype=torch.float64)
    logits, q = logits_of(), plain_log_q(objective, FEATURES).detach()
    h, rows = logits.softmax(1), []
    for i in range(4):
        span = range(INDPTR[i], INDPTR[i + 1])
        product = torch.stack([q[n].exp() ** weight[n] for n in span]).prod(0) if span else torch.ones(C)
        rows.append(product * (h[i] if use_prior or not span else 1.0))
    joint = torch.stack(rows)
    expected = joint / joint.sum(1, keepdim=True)
    assert_close(objective.posterior(logits, annotations, FEATURES), expected)
    assert_close(objective.posterior(logits, annotations, FEATURES)[1], h[1])
    each = (h[ITEM] * q.exp()).sum(1).log()
    assert_close(objective.log_likelihood(logits, annotations, FEATURES), each)
    marginal = plain_items(objective, logits, FEATURES, weight, "item")
    for block in (lia_modules.BLOCK_NUMBERS, 60):  # two items at a time
        monkeypatch.setattr(_pair_em, "BLOCK_NUMBERS", block)
        other = copy.deepcopy(objective)
        other.on_train_start(annotations, lambda: (logits, FEATURES))
        other.on_epoch_start(1)
        assert_close(other.targets, expected)
        assert other.history[0].log_likelihood == pytest.approx(-marginal.sum().item())


def test_gradient_of_the_marginal_is_that_of_em_with_the_e_step_in_the_batch() -> None:
    marginal, em = perturbed(make(rounds=0)), perturbed(make(rounds=1))
    logits = logits_of().requires_grad_()
    em.on_train_start(batch())
    em.targets = em.posterior(logits, batch(), FEATURES)
    gradients = [torch.autograd.grad(o(logits, batch(), FEATURES), [logits, *o.parameters()]) for o in (marginal, em)]
    assert_close(*gradients)


@pytest.mark.quick(2)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", ["default", "embedding"])
def test_gradcheck(name: str, phase: str) -> None:
    objective = perturbed(make(**{**OPTIONS[name], **PHASES[phase], "num_latents": 2, "num_layers": 1}))
    objective.on_train_start(crowd(True, C))
    names = [key for key, _ in objective.named_parameters()]

    def loss(logits: Tensor, x: Tensor, *values: Tensor) -> Tensor:
        arguments = (logits, crowd(True, C), x)
        return torch.func.functional_call(objective, dict(zip(names, values, strict=True)), arguments)

    features = FEATURES.clone().requires_grad_(name == "default")
    inputs = [logits_of().requires_grad_(), features]
    inputs += [p.detach().clone().requires_grad_() for p in objective.parameters()]
    assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, inputs, atol=1e-4, fast_mode=True)


# Start, phases, rounds


def test_start() -> None:
    objective = make()
    bias = objective.pairs.competence.output.bias.view(C, C, 3)
    assert torch.equal(bias, 2 * torch.eye(C)[:, :, None].expand(C, C, 3))
    assert (objective.confusion().argmax(2) == torch.arange(C)).all()
    assert objective.confusion().sum(2).allclose(torch.ones(R, C))
    default = LIA(8, 59)
    assert default.pairs.difficulty.input_size is None and default.pairs.annotators.values.shape == (59, 16)
    # as long as the length of the features is not known
    assert_close(default.confusion().mean(0), (2 * torch.eye(8)).softmax(1), atol=0.02, rtol=0)
    assert default.pairs.difficulty.input_size is None
    default.set_feature_dim(7)
    sizes = [tuple(layer.weight.shape) for layer in default.pairs.difficulty.layers]
    assert sizes == [(16, 7), (16, 16), (16, 16), (16, 16), (8 * 8 * 4, 16)]
    assert [tuple(layer.weight.shape) for layer in default.pairs.competence.layers] == [(8 * 8 * 4, 16)]
    assert 0.05 < default.pairs.annotators.values.std() < 0.2
    even = make(init_diagonal=0.0, num_labels=4)
    assert (even.pairs.competence.output.bias == 0).all() and even.confusion().shape == (R, C, 4)


def test_phases_follow_the_epoch() -> None:
    objective = make(rounds=2, epochs_per_round=3)
    objective.on_train_start(batch(), lambda: (logits_of(dtype=torch.float32), FEATURES.float()))
    assert_close(objective.targets[:2], torch.tensor([[0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]]))
    marginal, rounds = [], []
    for epoch in range(10):
        objective.on_epoch_start(epoch)
        marginal.append(objective.marginal)
        rounds.append(len(objective.history))
        objective.on_epoch_end(epoch)
    assert marginal == [False] * 6 + [True] * 4 and rounds == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert objective.em_epochs == 6
    endless = make(rounds=1, finetune="none")
    endless.on_train_start(batch(), lambda: (logits_of(dtype=torch.float32), FEATURES.float()))
    endless.on_epoch_start(7)
    assert not endless.marginal
    alone = make(rounds=0)  # no callback: neither targets nor predictions
    alone.on_epoch_start(3)
    assert alone.marginal and alone(logits_of(dtype=torch.float32), batch(), FEATURES.float()) > 0
    with pytest.raises(RuntimeError, match="on_train_start"):
        make()(logits_of(dtype=torch.float32), batch(), FEATURES.float())


@pytest.mark.parametrize("latents", [1, 3])
def test_likelihood_never_decreases_where_m_steps_raise_what_they_maximise(latents: int) -> None:
    objective = perturbed(make(rounds=12, num_latents=latents))
    logits = logits_of().requires_grad_()
    objective.on_train_start(batch(True), lambda: (logits.detach(), FEATURES))
    optimizer = torch.optim.SGD([logits, *objective.parameters()], lr=0.01)
    for epoch in range(13):
        objective.on_epoch_start(epoch)
        assert not objective.marginal or epoch == 12
        for _ in range(10):
            optimizer.zero_grad()
            objective(logits, batch(True), FEATURES).backward()
            optimizer.step()
    values = [r.log_likelihood for r in objective.history]
    # the first targets are votes, no E-step: monotone from the first round on
    assert len(values) == 12 and all(b >= a - 1e-9 for a, b in zip(values, values[1:], strict=False))
    assert values[-1] > values[0] + 0.5


# State


def test_confusion_is_the_mean_over_instances_of_a_class() -> None:
    objective = perturbed(make())
    q = torch.zeros(R, C, C, dtype=torch.float64)
    pairs = objective.pairs
    objective.on_train_start(batch(), lambda: (logits_of(), FEATURES))
    objective.on_epoch_start(1)
    share = objective.targets / objective.targets.sum(0)
    assert share.std(0).min() > 0.05  # or weights would make no difference
    for x, weight in zip(FEATURES, share, strict=True):
        d = plain_mlp(pairs.difficulty, x).view(pairs.shape).exp()
        for r in range(R):
            table = (d * plain_mlp(pairs.competence, pairs.annotators.values[r]).view(pairs.shape).exp()).sum(2)
            q[r] += weight.unsqueeze(1) * table / table.sum(1, keepdim=True)
    confusion = objective.confusion()
    assert not confusion.requires_grad
    assert_close(confusion, q.detach())
    assert_close(objective.reliability(), q.detach().diagonal(dim1=1, dim2=2).mean(1))
    assert lia_modules.spaced(1000, 4).tolist() == [0, 250, 500, 750] and lia_modules.spaced(2, 4).tolist() == [0, 1]


@pytest.mark.parametrize("name", OPTIONS)
def test_state_dict_round_trip(name: str) -> None:
    objective = perturbed(make(**OPTIONS[name]), torch.float32)
    annotations, logits = crowd(False, objective.num_labels), logits_of(dtype=torch.float32)
    objective.on_train_start(annotations, lambda: (logits, FEATURES.float()))
    early = copy.deepcopy(objective.state_dict())  # before the first round
    objective.on_epoch_start(1)
    stream = io.BytesIO()
    torch.save(objective.state_dict(), stream)
    stream.seek(0)
    fresh = make(**{**OPTIONS[name], "feature_dim": None})
    fresh.load_state_dict(torch.load(stream, weights_only=True))
    assert torch.equal(fresh.targets, objective.targets)
    assert [r[:3] for r in fresh.history] == [r[:3] for r in objective.history]
    assert_close(fresh.confusion(), objective.confusion())
    fresh.on_train_start(annotations, lambda: (logits, FEATURES.float()))
    fresh.on_epoch_start(2)
    assert [r.round for r in fresh.history] == [1, 2]
    arguments = logits, annotations, FEATURES.float()
    assert torch.equal(fresh.posterior(*arguments), objective.posterior(*arguments))
    fresh.load_state_dict(early)
    assert torch.equal(fresh.targets, early["targets"]) and fresh.references.shape == early["references"].shape


def test_annotators_that_come_later() -> None:
    objective = perturbed(make())
    wider = objective.with_annotators(2)
    assert wider.num_annotators == R + 2 and objective.num_annotators == R
    assert_close(wider.confusion()[:R], objective.confusion())
    mean = objective.pairs.annotators.values.mean(0)
    assert_close(wider.pairs.annotators.values[R:].detach(), mean.expand(2, -1).detach())
    later = Annotations([0, 1], [R + 1], [0], num_annotators=R + 2, num_classes=C)
    arguments = logits_of(1), later, FEATURES[:1]
    assert not torch.allclose(wider.posterior(*arguments), logits_of(1).softmax(1))
    assert wider.pairs.annotators.embedding in list(wider.parameters())
    people = perturbed(make(annotator_features=PEOPLE))
    known = people.with_annotators(PEOPLE[1:3])
    assert_close(known.confusion()[R:], people.confusion()[1:3])
    assert torch.equal(known.pairs.annotators.features[:R], PEOPLE)
    for wrong in (0, True, PEOPLE):
        with pytest.raises(ValueError, match="number of new ones"):
            objective.with_annotators(wrong)
    for wrong in (2, PEOPLE[:, :2], PEOPLE[:0]):
        with pytest.raises(ValueError, match=r"features \[M, 3\]"):
            people.with_annotators(wrong)
    with pytest.raises(ValueError, match="finite"):
        people.with_annotators(PEOPLE * torch.nan)
