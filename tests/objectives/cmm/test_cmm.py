"""CMM as an objective: rounds, what it shows, the end-to-end form, checkpoints and errors."""

from __future__ import annotations

import copy
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import small_run
from support.compare import assert_close
from support.small_crowd import INDPTR, LABEL, C, R, batch, logits_of, perturbed
from support.two_levels import crowd, points, train
from torch import Tensor, nn

import crowdnal
from crowdnal import Annotations
from crowdnal.aggregation import vote_proportions
from crowdnal.objectives import CMM
from crowdnal.objectives.cmm.em import label_cells, maximise
from crowdnal.objectives.cmm.init import cluster_labels, initial_counts

D = 5
GRADIENT: dict[str, Any] = {
    "gradient": partial(CMM, training="gradient"),
    "gradient global": partial(CMM, training="gradient", setting="global", num_groups=2),
    "one group": partial(CMM, training="gradient", num_groups=1),
}
EM: dict[str, Any] = {
    "em": CMM,
    "em global": partial(CMM, setting="global"),
    "em annotators": partial(CMM, grouped="annotators", num_groups=2),
}


FEATURES = torch.randn(4, D, generator=torch.Generator().manual_seed(2), dtype=torch.double)


def gated(**options: Any) -> CMM:
    return perturbed(CMM(C, R, training="gradient", gate="features", feature_dim=D, **options))


def dense_nll(objective: CMM, logits: Tensor, alpha: Tensor) -> Tensor:
    """-log sum_m alpha_im sum_k f_ik beta^m[k, y], [nnz], by the book; alpha [4, M]."""
    f, beta = logits.softmax(1), objective.mixture.log_beta.softmax(1).transpose(1, 2)
    q = torch.einsum("im,ik,mkj->ij", alpha, f, beta)
    return -q[batch().item, LABEL].log()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("gate", [False, True])
def test_gradient_form_is_the_dense_formula(gate: bool, weighted: bool) -> None:
    objective = gated(reduction="none") if gate else perturbed(CMM(C, R, training="gradient", reduction="none"))
    features = FEATURES.clone().requires_grad_()
    logits, a = logits_of().requires_grad_(), batch(weighted)
    alpha = objective.mixture.log_alpha.expand(4, -1)
    if gate:
        alpha = alpha + features @ objective.mixture.gate.weight.T
    expected = dense_nll(objective, logits, alpha.softmax(1))
    weight = torch.ones(6) if a.weight is None else a.weight
    ours = objective(logits, a, features if gate else None)
    assert_close(ours, expected * weight)
    inputs = [logits, *objective.parameters(), *([features] if gate else [])]
    up = torch.arange(1.0, 7.0, dtype=torch.double)
    assert_close(torch.autograd.grad(ours, inputs, up), torch.autograd.grad(expected * weight, inputs, up))
    assert_close(objective.log_likelihood(logits, a, features), -expected.detach())


def test_gradcheck() -> None:
    objective = gated()
    names, values = zip(*objective.named_parameters(), strict=True)

    def loss(logits: Tensor, features: Tensor, *parameters: Tensor) -> Tensor:
        state = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(objective, state, (logits, batch(weighted=True), features))

    inputs = (logits_of().requires_grad_(), FEATURES.clone().requires_grad_(), *values)
    assert torch.autograd.gradcheck(loss, inputs)
    assert torch.autograd.gradgradcheck(loss, inputs)


def test_a_label_set_of_another_size() -> None:
    objective = CMM(C, R, num_labels=5, training="gradient")
    a = Annotations([0, 2], [0, 1], [1, 4], num_annotators=R, num_classes=5)
    objective.on_train_start(a)
    logits = torch.randn(1, C, requires_grad=True)
    objective(logits, a).backward()
    assert logits.grad is not None and logits.grad.abs().sum() > 0
    assert objective.confusion().shape == (R, C, 5) and objective.group_confusion().shape == (3, C, 5)


# EM in rounds


def test_a_round_is_an_e_step_and_an_m_step() -> None:
    (made, _), table = crowd(items=60), torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
    a, objective = made.annotations, CMM(3, 40, smoothing=0.5, laplace=True)
    objective.on_train_start(a, lambda: (table, None))
    assert torch.equal(objective.targets, a.votes()) and objective.history == []
    cells, shares = label_cells(a), vote_proportions(a, 3)
    groups = cluster_labels(cells, shares, 3, 0)
    alpha, beta = (v.exp() for v in maximise(initial_counts(cells, shares, groups, 3), 0.5))
    assert_close(objective.group_weights().double(), alpha)
    assert_close(objective.group_confusion().double(), beta.transpose(1, 2))
    objective.on_epoch_start(1)
    q = torch.einsum("mjk,ik,m->ijmk", beta, table.double().softmax(1), alpha)
    r, total = a.votes().double(), q.sum((2, 3))
    assert objective.history[0].log_likelihood == pytest.approx(float((r * total.log()).sum()))
    expected = r[:, :, None, None] * q / total[:, :, None, None]
    assert_close(objective.targets.double(), expected.sum((1, 2)))
    counts = expected.sum(0).permute(1, 2, 0) + 0.5  # [M, C, K]
    assert_close(objective.group_confusion().double(), counts / counts.sum(2, keepdim=True))
    # an item counts as often as it was labelled
    logits = torch.randn(60, 3)
    loss = -(objective.targets * logits.log_softmax(1)).sum(1)
    assert_close(objective(logits, a), loss[a.counts > 0].mean())
    assert_close(objective.targets.sum(1), a.counts.float())


def test_individual_confusions_are_mixed_by_the_posterior_of_the_annotator() -> None:
    (made, _), table = crowd(items=60), torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
    a, objective = made.annotations, CMM(3, 40)
    objective.on_train_start(a, lambda: (table, None))
    everyone = torch.einsum("m,mck->ck", objective.group_weights(), objective.group_confusion())
    assert_close(objective.confusion(), everyone.expand(40, 3, 3).to(objective.confusion()))
    objective.on_epoch_start(1)
    beta, alpha, f = objective.group_confusion().double(), objective.group_weights().double(), table.double().softmax(1)
    posterior = alpha.repeat(40, 1)
    for i, r, y in zip(a.item.tolist(), a.annotator.tolist(), a.label.tolist(), strict=True):
        posterior[r] *= f[i] @ beta[:, :, y].T
    posterior /= posterior.sum(1, keepdim=True)
    assert_close(objective.group_posteriors(table.double(), a), posterior)
    shown = torch.einsum("rm,mck->rck", posterior, beta)
    assert_close(objective.confusion().double(), shown, atol=1e-5, rtol=1e-4)
    per_label = objective.annotation_posteriors(table.double(), a)
    expected = alpha * torch.stack([f[i] @ beta[:, :, y].T for i, y in zip(a.item, a.label, strict=True)])
    assert_close(per_label, expected / expected.sum(1, keepdim=True))
    p = torch.einsum("nk,nkj->nj", f[a.item], shown[a.annotator])[torch.arange(len(a.label)), a.label]
    assert_close(objective.log_likelihood(table.double(), a), p.log(), atol=1e-5, rtol=1e-5)


def test_global_does_not_care_who_labelled() -> None:
    made, truth = crowd()
    a, x = made.annotations, points(truth)
    renamed = a.annotator[torch.randperm(len(a.annotator), generator=torch.Generator().manual_seed(1))]
    other = Annotations(a.indptr, renamed, a.label, num_annotators=40, num_classes=3, item_id=a.item_id)
    states = [train(CMM(3, 40, setting="global"), x, each, 4).model.state_dict() for each in (a, other)]
    for key, value in states[0].items():
        if isinstance(value, Tensor) and "extra" not in key:
            assert torch.equal(value, states[1][key]), key


def test_rounds_stop_where_the_likelihood_does() -> None:
    made, truth = crowd()
    table = 3 * nn.functional.one_hot(truth, 3).float()
    objective = CMM(3, 40, tolerance=1e-3)
    objective.on_train_start(made.annotations, lambda: (table, None))
    for epoch in range(30):
        assert not objective.converged or len(objective.history) >= 2
        objective.on_epoch_start(epoch)
    assert objective.converged and 2 <= len(objective.history) < 20
    last, before = (objective.history[-n].log_likelihood for n in (1, 2))
    assert abs(last - before) <= 1e-3 * abs(before)
    few = CMM(3, 40, max_rounds=2, tolerance=0.0)
    few.on_train_start(made.annotations, lambda: (table, None))
    for epoch in range(9):
        few.on_epoch_start(epoch)
    assert len(few.history) == 2 and not few.converged


# State, errors, the command


def test_a_checkpoint_goes_on_where_it_stopped() -> None:
    made, truth = crowd()
    callback = train(CMM(3, 40), points(truth), made.annotations, 4)
    stream = io.BytesIO()
    torch.save(callback.model.state_dict(), stream)
    stream.seek(0)
    fresh = CMM(3, 40)
    again = crowdnal.attach(copy.deepcopy(callback.model.backbone), fresh)
    again.load_state_dict(torch.load(stream, weights_only=True))
    before = callback.model.objective
    assert isinstance(before, CMM)
    assert torch.equal(fresh.targets, before.targets) and torch.equal(fresh.confusion(), before.confusion())
    assert [r[:3] for r in fresh.history] == [r[:3] for r in before.history]
    assert torch.equal(copy.deepcopy(before).targets, before.targets)
    table = callback.predict()[0]
    for objective in (before, fresh):
        objective.on_train_resume(made.annotations, lambda: (table, None))
        objective.on_epoch_start(4)
    assert torch.equal(fresh.membership, before.membership) and len(fresh.history) == 4
    trained = train(CMM(3, 40, training="gradient"), points(truth), made.annotations, 3).model.objective
    other = CMM(3, 40, training="gradient")
    other.load_state_dict(trained.state_dict())
    other.on_train_resume(made.annotations, lambda: (table, None))  # keeps what was trained
    assert torch.equal(other.confusion(), trained.confusion())


def test_nothing_to_learn_from() -> None:
    nothing = Annotations([0, 0, 0], [], [], num_annotators=R, num_classes=C)
    for make in (*EM.values(), *GRADIENT.values()):
        objective = make(C, R)
        objective.on_train_start(nothing, lambda: (torch.zeros(2, C), None))
        objective.on_epoch_start(1)
        logits = torch.zeros(2, C, requires_grad=True)
        objective(logits, nothing).backward()
        assert logits.grad is not None and not logits.grad.any()
        assert objective.confusion().isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"training": "emm"}, "training='emm' is unknown: use one of em, gradient"),
        ({"setting": "both"}, "setting='both'"),
        ({"grouped": "items"}, "grouped='items'"),
        ({"gate": "none"}, "gate='none'"),
        ({"gate": "features"}, "no closed form: use training='gradient'"),
        ({"num_groups": 0}, "num_groups=0"),
        ({"max_rounds": True}, "max_rounds=True"),
        ({"smoothing": -1.0}, "smoothing=-1.0"),
        ({"tolerance": float("nan")}, "tolerance=nan"),
        ({"num_labels": 2}, "num_labels=2 differs from num_classes=3"),
        ({"grouped": "annotators", "training": "gradient"}, "use training='em' and setting='individual'"),
        ({"grouped": "annotators", "setting": "global"}, "use training='em' and setting='individual'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CMM(C, R, **options)


def test_features_of_another_length() -> None:
    with pytest.raises(ValueError, match="features have length 4 but feature_dim=5"):
        gated()(logits_of(), batch(), FEATURES[:, :4])
    lazy = CMM(C, R, training="gradient", gate="features")
    lazy(logits_of(dtype=torch.float32), batch(), FEATURES.float())
    assert lazy.mixture.gate is not None and not lazy.mixture.gate.weight.any()
    again = CMM(C, R, training="gradient", gate="features")
    again.load_state_dict(lazy.state_dict())
    assert INDPTR == batch().indptr.tolist()


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", [(), ("training=gradient", "num_groups=2"), ("training=gradient", "gate=features")])
def test_train_command(tmp_path: Path, options: tuple[str, ...]) -> None:
    root = small_run.write(tmp_path / "data")
    config = small_run.frozen(root, tmp_path / "out", objective="cmm", options=options, epochs=4)
    found = small_run.go(config)
    table = small_run.read(tmp_path / "out" / "annotators.csv")
    assert len(table) == len(small_run.WORKERS) and found.objective.confusion().shape == (5, 3, 3)
