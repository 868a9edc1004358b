"""DL-CL_Over, UnionNet, DoctorNet, WDN and Max-MIG against their formulas and their contract."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.compare import assert_close
from support.heads import ITEM, LABELS, MAKERS, features_of, head_probs, make
from support.small_crowd import ANNOTATOR, INDPTR, LABEL, C, R, batch, logits_of
from torch import Tensor

from crowdnal.data import Annotations
from crowdnal.objectives import DoctorNet, MaxMIG, Objective, OverparametrizedCrowdLayer, UnionNet, WeightedDoctorNet

# Values: every loss once more, dense and slow


def terms(objective: Objective, logits: Tensor, x: Tensor) -> Tensor:
    """Loss of each annotation."""
    p = logits.softmax(-1)
    if isinstance(objective, OverparametrizedCrowdLayer):
        hidden = torch.einsum("bc,rck->brk", p, objective.annotators.first.weight)
        hidden = hidden.softmax(-1) if objective.annotators.hidden == "softmax" else hidden
        table = torch.einsum("brc,rck->brk", hidden, objective.annotators.second.weight).log_softmax(-1)
    elif isinstance(objective, UnionNet):
        union = objective.annotators.weight.permute(2, 0, 1).reshape(C, R * C)  # [C, R·K]
        log_union = (p @ union).log_softmax(-1) if objective.variant == "A" else (p @ union.softmax(-1)).log()
        table = log_union.view(-1, R, C)
    else:
        table = head_probs(objective, logits, x)
        if isinstance(objective, WeightedDoctorNet):
            table = torch.einsum("brk,r->bk", table, objective.averaging.softmax(0))[:, None].expand(-1, R, -1)
        table = table.log()
    return -table[ITEM, ANNOTATOR, LABEL]


def reduced(each: Tensor, reduction: str, weight: Tensor) -> Tensor:
    if reduction == "none":
        return weight * each
    if reduction == "sum":
        return (weight * each).sum()
    if reduction == "mean":
        return (weight * each).sum() / weight.sum()
    spans = [slice(INDPTR[i], INDPTR[i + 1]) for i in (0, 2, 3)]
    return sum((weight[s] * each[s]).sum() / weight[s].sum() for s in spans) / 3


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "item_mean"])
@pytest.mark.parametrize("name", LABELS)
def test_loss_and_gradients_equal_the_dense_formula(name, reduction, weighted):
    objective = make(name, reduction=reduction)
    annotations = batch(weighted)
    weight = torch.ones(6, dtype=torch.float64) if annotations.weight is None else annotations.weight
    logits, x = logits_of().requires_grad_(), features_of().requires_grad_()
    inputs = [objective.averaging] if name == "weighted doctor" else [logits, x, *objective.parameters()]
    ours = objective(logits, annotations, x)
    plain = reduced(terms(objective, logits, x), reduction, weight)
    assert_close(ours, plain)
    upstream = torch.arange(1, 1 + ours.numel(), dtype=torch.float64).view(ours.shape) * 0.7
    expected = torch.autograd.grad(plain, inputs, upstream, materialize_grads=True)
    assert_close(torch.autograd.grad(ours, inputs, upstream, materialize_grads=True), expected)


def mutual_information(objective: MaxMIG, logits: Tensor, annotations: Annotations) -> Tensor:
    """Minus the gain, over the labelled items 0, 2, 3, by a matrix of all pairs."""
    weight = [1.0] * 6 if annotations.weight is None else annotations.weight.tolist()
    log_prior = objective.prior_logits.log_softmax(0)
    g = []
    for i in (0, 2, 3):
        scores = log_prior
        for n in range(INDPTR[i], INDPTR[i + 1]):
            scores = scores + weight[n] * objective.annotators.weight[ANNOTATOR[n], LABEL[n]]
        g.append(scores.softmax(0))
    m = logits.softmax(-1)[[0, 2, 3]] / log_prior.exp() @ torch.stack(g).T
    return -(1 + m.diagonal().log()).mean() + (m.sum() - m.trace()) / 6


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["mig", "mig prior"])
def test_max_mig_equals_the_formula_over_all_pairs(name, weighted):
    objective, annotations = make(name), batch(weighted)
    logits = logits_of().requires_grad_()
    inputs = [logits, *(p for p in objective.parameters() if p.requires_grad)]
    ours, plain = objective(logits, annotations), mutual_information(objective, logits, annotations)
    assert_close(ours, plain)
    assert_close(torch.autograd.grad(ours, inputs), torch.autograd.grad(plain, inputs))
    each = make(name, reduction="none")(logits, annotations)
    assert each.shape == (4,) and each[1] == 0
    assert_close(each.sum() / 3, ours)
    assert_close(make(name, reduction="sum")(logits, annotations), 3 * ours)
    assert_close(make(name, reduction="item_mean")(logits, annotations), ours)


def test_max_mig_without_pairs_and_with_extreme_logits():
    objective = make("mig")
    one = batch()[torch.tensor([0, 1])]  # the second has no labels, and its logits must not matter
    logits = torch.stack([logits_of()[0], torch.full((C,), float("nan"), dtype=torch.float64)]).requires_grad_()
    loss = objective(logits, one)
    log_ratio = objective.aggregate(one)[0] - objective.prior_logits.log_softmax(0)
    assert_close(loss, -1 - (logits[0].log_softmax(0) + log_ratio).logsumexp(0))
    loss.backward()
    assert logits.grad[0].abs().sum() > 0 and (logits.grad[1] == 0).all()
    extreme = (1e3 * torch.eye(C, dtype=torch.float64))[[0, 1, 2, 0]].requires_grad_()
    loss = objective(extreme, batch())
    loss.backward()
    assert loss.isfinite() and extreme.grad.isfinite().all()


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", MAKERS)
def test_gradcheck(name):
    objective = make(name)
    parameters = [p for p in objective.parameters() if p.requires_grad]
    parameters = [objective.averaging] if name == "weighted doctor" else parameters
    names = [key for key, p in objective.named_parameters() if any(p is q for q in parameters)]

    def loss(logits, x, *values):
        arguments = (logits, batch(True), x)
        return torch.func.functional_call(objective, dict(zip(names, values, strict=True)), arguments)

    frozen = name == "weighted doctor"
    logits, x = logits_of().requires_grad_(not frozen), features_of().requires_grad_("doctor" in name and not frozen)
    inputs = (logits, x, *(p.detach().clone().requires_grad_() for p in parameters))
    assert torch.autograd.gradcheck(loss, inputs)
    assert torch.autograd.gradgradcheck(loss, inputs)


# Contract


@pytest.mark.parametrize("name", [name for name in MAKERS if "doctor" not in name])
def test_label_set_of_another_size(name):
    init = {} if "over" in name else {"init": "identity"}
    if name == "mig prior":
        init["class_prior"] = "uniform"
    objective = MAKERS[name](C, R, num_labels=5, **init)
    annotations = Annotations([0, 2], [0, 1], [1, 4], num_annotators=R, num_classes=5)
    logits = torch.randn(1, C, requires_grad=True)
    objective(logits, annotations).backward()
    assert logits.grad.abs().sum() > 0
    assert_close(objective.confusion().sum(-1), torch.ones(R, C))
    assert objective.posterior(logits, annotations).shape == (1, C)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(OverparametrizedCrowdLayer, hidden="relu"), "hidden='relu'.*linear, softmax"),
        (partial(UnionNet, variant="C"), "variant='C'.*A, B"),
        (partial(UnionNet, init="zeros"), "init='zeros'.*votes, identity"),
        (partial(UnionNet, num_labels=2), "num_labels=2.*init='crowd'"),
        (partial(MaxMIG, num_labels=2), "num_labels=2.*init='crowd'"),
        (partial(MaxMIG, num_labels=2, init="identity", class_prior="votes"), "num_labels=2.*class_prior='votes'"),
        (partial(MaxMIG, init="zeros"), "init='zeros'"),
        (partial(MaxMIG, class_prior="zeros"), "class_prior='zeros'"),
        (partial(MaxMIG, offset=0.0), "offset=0.0 must be above 0"),
        (partial(DoctorNet, num_labels=5), "num_labels=5.*DoctorNet"),
        (partial(DoctorNet, heads="own"), "heads='own'.*pooled, residual, separate"),
        (partial(DoctorNet, feature_dim=0), "feature_dim=0 must be a positive"),
        (partial(WeightedDoctorNet, head_epochs=-1), "head_epochs=-1"),
    ],
)
def test_bad_options_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make(C, R)
