"""CoNAL by EM around a classifier: rounds as the labels-only function makes them, and what they find."""

from __future__ import annotations

import io

import pytest
import torch
from support.attached import C, R, labels
from support.compare import assert_close
from support.conal import HARD, PEOPLE_IN_CROWD, crowd_of
from support.small_run import frozen, go, write
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import crowdnal
from crowdnal import metrics
from crowdnal.aggregation import conal_em
from crowdnal.objectives import CoNALEM, MajorityVote

N = 40


def begun(logits: Tensor, **options) -> CoNALEM:
    objective = CoNALEM(C, R, **options)
    objective.on_train_start(labels(N), lambda: (logits, None))
    return objective


@pytest.mark.parametrize("omega", ["annotator", "annotation"])
def test_rounds_with_a_fixed_classifier_are_the_iterations_of_conal_em(omega):
    logits = torch.randn(N, C, generator=torch.Generator().manual_seed(0))
    objective = begun(logits, omega=omega, smoothing=0.2).double()
    for rounds in range(1, 4):
        before = objective.confusion()
        objective.on_epoch_start(rounds)
        found = conal_em(labels(N), log_prior=logits, omega=omega, smoothing=0.2, max_iterations=rounds, tolerance=-1)
        assert_close(objective.targets, found.posterior, rtol=1e-5, atol=1e-6)
        assert_close(before, found.confusion, rtol=1e-5, atol=1e-6)
        assert objective.history[-1].log_likelihood == pytest.approx(found.log_likelihood[-1], rel=1e-6)


@pytest.mark.parametrize("omega", ["annotator", "annotation"])
def test_the_likelihood_never_falls(omega):
    logits = torch.randn(N, C, generator=torch.Generator().manual_seed(1))
    objective = begun(logits, omega=omega, smoothing=0.0).double()
    for epoch in range(30):
        objective.on_epoch_start(epoch)
    likelihoods = torch.tensor([made.log_likelihood for made in objective.history])
    assert len(likelihoods) == 29 and (likelihoods.diff() > -1e-6).all() and likelihoods[5] > likelihoods[0] + 0.1


def test_likelihood_and_posterior_mix_both_confusions():
    objective = begun(torch.zeros(N, C)).double()
    objective.on_epoch_start(1)
    a, logits = labels(N), torch.randn(N, C, dtype=torch.float64)
    omega, common, own = objective.omega, objective.common_confusion(), objective.confusion()
    assert omega.unique().numel() > 1
    p, joint = logits.softmax(1), logits.log_softmax(1).clone()
    for n, (i, r, y) in enumerate(zip(a.item.tolist(), a.annotator.tolist(), a.label.tolist(), strict=True)):
        rows = omega[r] * common[:, y] + (1 - omega[r]) * own[r, :, y]
        joint[i] += rows.log()
        assert_close(objective.log_likelihood(logits, a)[n], (p[i] @ rows).log())
    assert_close(objective.posterior(logits, a), joint.softmax(1))
    assert_close(common.sum(1), torch.ones(C, dtype=torch.float64))
    assert_close(own.sum(2), torch.ones(R, C, dtype=torch.float64))


@pytest.mark.parametrize("omega", ["annotator", "annotation"])
def test_a_checkpoint_goes_on(omega):
    logits = torch.randn(N, C, generator=torch.Generator().manual_seed(2))
    objective = begun(logits, omega=omega)
    objective.on_epoch_start(1)
    file = io.BytesIO()
    torch.save(objective.state_dict(), file)
    file.seek(0)
    other = CoNALEM(C, R, omega=omega)
    other.load_state_dict(torch.load(file, weights_only=True))
    other.on_train_resume(labels(N), lambda: (logits, None))
    for each in (objective, other):
        each.on_epoch_start(2)
    assert all(torch.equal(a, b) for a, b in zip(objective.buffers(), other.buffers(), strict=True))
    assert [made[:3] for made in objective.history] == [made[:3] for made in other.history]


@pytest.mark.slow
def test_finds_common_and_individual_confusions_and_beats_the_vote():
    x, truth, made = crowd_of(items=1500, seed=1)
    test_x, test_truth, _ = crowd_of(items=1500, seed=11)
    accuracy = {}
    for objective in (CoNALEM(HARD, PEOPLE_IN_CROWD), MajorityVote(HARD, PEOPLE_IN_CROWD)):
        torch.manual_seed(0)
        model = crowdnal.attach(nn.Linear(x.shape[1], HARD), objective)
        dataset = crowdnal.CrowdDataset(TensorDataset(x), made.annotations)
        loader = DataLoader(dataset, batch_size=250, collate_fn=crowdnal.collate)
        callback = crowdnal.ObjectiveCallback(model, loader)
        optimizer = torch.optim.Adam(model.backbone.parameters(), lr=0.02)
        for epoch in range(20):
            callback.on_epoch_start(epoch)
            for batch, given in loader:
                optimizer.zero_grad()
                model(batch, given).loss.backward()
                optimizer.step()
            callback.on_epoch_end(epoch)
        accuracy[objective.name] = metrics.accuracy(model(test_x).detach(), test_truth)
        if isinstance(objective, CoNALEM):
            common, own = objective.common_confusion(), objective.confusion()
            assert metrics.accuracy(objective.targets, truth) > 0.98
    assert accuracy["conal-em"] > 0.97 and accuracy["conal-em"] > accuracy["majority-vote"] + 0.1
    distance = (common - made.common).square().mean()
    assert distance < 0.03 and ((own - made.common).square().mean((1, 2)) > distance).all()
    assert metrics.confusion_error(made.individual, own) < 0.16
    assert torch.corrcoef(torch.stack([own.flatten(), made.individual.flatten()]))[0, 1] > 0.75


def test_the_command_line_trains_it(tmp_path):
    result = go(frozen(write(tmp_path), tmp_path / "out", objective="conal-em", options=("omega=annotation",)))
    assert isinstance(result.objective, CoNALEM) and len(result.objective.history) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"omega": "item"}, "omega='item'"),
        ({"smoothing": -1.0}, "smoothing=-1.0"),
        ({"num_labels": C - 1}, "CoNALEM, which is initialised by the votes, cannot model"),
        ({"epochs_per_round": 0}, "epochs_per_round=0"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        CoNALEM(C, R, **options)
