"""CoNAL against the formulas of its paper, its options, and common noise told from individual noise."""

from __future__ import annotations

import copy

import pytest
import torch
from support.compare import assert_close
from support.conal import FEATURES, HARD, ITEM, OPTIONS, PEOPLE_IN_CROWD, D, crowd_of, make
from support.small_crowd import ANNOTATOR, INDPTR, LABEL, C, R, batch, logits_of, perturbed
from torch import Tensor, nn

from crowdnal import metrics
from crowdnal.data import Annotations
from crowdnal.objectives import CoNAL, MajorityVote


def plain_omega(objective: CoNAL, features: Tensor = FEATURES) -> Tensor:
    """One annotation at a time, one-hot identities and all."""
    source = objective.noise_source
    given = torch.eye(R, dtype=torch.float64) if source.features is None else source.features
    omega = []
    for i, r in zip(ITEM, ANNOTATOR, strict=True):
        u = given[r] @ source.annotators[:, :, 0] + source.bias
        v = source.hidden.weight @ features[i] + source.hidden.bias
        if source.items is not None:
            v = source.items.weight @ v + source.items.bias
        if objective.noise_source.normalize_items:
            v = v / v.norm()
        omega.append(torch.sigmoid(u / u.norm() @ v))
    return torch.stack(omega)


def plain_nll(objective: CoNAL, logits: Tensor, features: Tensor = FEATURES) -> Tensor:
    common, own = objective.common, objective.annotators.weight
    p, omega, terms = torch.softmax(logits, 1), plain_omega(objective, features), []
    for n, (i, r, y) in enumerate(zip(ITEM, ANNOTATOR, LABEL, strict=True)):
        if objective.mixing == "logits":
            q = torch.softmax(omega[n] * (p[i] @ common) + (1 - omega[n]) * (p[i] @ own[r]), 0)
        else:
            q = omega[n] * torch.softmax(p[i] @ common, 0) + (1 - omega[n]) * torch.softmax(p[i] @ own[r], 0)
        terms.append(-torch.log(q[y]))
    return torch.stack(terms)


def plain_penalty(objective: CoNAL) -> Tensor:
    chosen = range(R) if objective.scope == "all" else sorted(set(ANNOTATOR))
    distance = sum((objective.annotators.weight[r] - objective.common).norm() for r in chosen)
    return -objective.separation_weight * distance


@pytest.mark.quick(20)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "item_mean", "per_item"])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_equal_plain_pytorch(name, reduction, weighted):
    objective = perturbed(make(reduction=reduction, **OPTIONS[name]))
    annotations = batch(weighted)
    weight = annotations.weight if weighted else torch.ones(6, dtype=torch.float64)
    logits, features = logits_of().requires_grad_(), FEATURES.clone().requires_grad_()
    inputs = [logits, features, *objective.parameters()]
    nll = plain_nll(objective, logits, features) * weight
    plain = nll
    if reduction != "none":
        spans = [slice(INDPTR[i], INDPTR[i + 1]) for i in (0, 2, 3)]
        item_mean = torch.stack([nll[s].sum() / weight[s].sum() for s in spans]).mean()
        plain = {"sum": nll.sum(), "mean": nll.sum() / weight.sum(), "item_mean": item_mean, "per_item": nll.sum() / 3}[
            reduction
        ]
        plain = plain + plain_penalty(objective)
    ours = objective(logits, annotations, features)
    assert_close(ours, plain)
    upstream = torch.arange(1, 1 + ours.numel(), dtype=torch.float64).view(ours.shape) * 0.7
    expected = torch.autograd.grad(plain, inputs, upstream)
    found = torch.autograd.grad(ours, inputs, upstream)
    assert [g.is_sparse for g in found].count(True) == {"sparse": 2, "sparse people": 1}.get(name, 0)
    assert_close([g.to_dense() for g in found], list(expected))


@pytest.mark.parametrize("name", ["logits", "batch"])
def test_gradcheck(name):
    objective = perturbed(make(**OPTIONS[name]))
    names = [key for key, _ in objective.named_parameters()]

    def loss(logits, features, *parameters):
        arguments = logits, batch(), features
        return torch.func.functional_call(objective, dict(zip(names, parameters, strict=True)), arguments)

    inputs = [logits_of(), FEATURES, *(p.detach() for p in objective.parameters())]
    inputs = [x.clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, inputs, atol=1e-4, fast_mode=True)


def test_start():
    objective = make(num_labels=4)
    assert torch.equal(objective.common, 2 * torch.eye(C, 4))
    assert torch.equal(objective.annotators.weight, (2 * torch.eye(C, 4)).expand(R, C, 4))
    default = CoNAL(8, 59, feature_dim=D)
    assert default.noise_source.annotators.shape == (59, 20, 1) and default.noise_source.hidden.weight.shape == (128, D)
    assert default.noise_source.items.weight.shape == (20, 128)
    one = CoNAL(8, 59, feature_dim=D, hidden_dim=None).noise_source
    assert one.hidden.weight.shape == (20, D) and one.items is None
    later = CoNAL(8, 59, hidden_dim=None)
    later.set_feature_dim(D)
    assert later.noise_source.hidden.weight.shape == (20, D)
    assert default.separation_weight == 1e-5 and default.mixing == "logits" and default.noise_source.normalize_items
    assert 0 < default.noise_source.annotators.abs().max() <= 59**-0.5


@pytest.mark.parametrize("scope", ["all", "batch"])
def test_the_start_where_all_matrices_are_equal_has_finite_derivatives(scope):
    objective = make(scope=scope, separation_weight=1.0).double()
    penalty = objective.penalty(batch())
    assert penalty == 0
    matrices = [objective.common, objective.annotators.weight]
    loss = objective(logits_of(), batch(), FEATURES)
    gradients = torch.autograd.grad(loss, matrices, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in gradients), matrices)
    assert all(g.isfinite().all() for g in [*gradients, *second])


@pytest.mark.parametrize("mixing", ["logits", "probabilities"])
def test_the_regulariser_pushes_matrices_apart_and_never_together(mixing):
    def distances(weight: float) -> Tensor:
        objective = make(mixing=mixing, separation_weight=weight).double()
        optimizer = torch.optim.SGD(objective.parameters(), lr=0.5)
        for _ in range(20):
            optimizer.zero_grad()
            objective(logits_of(), batch(), FEATURES).backward()
            optimizer.step()
        return (objective.annotators.weight - objective.common).flatten(1).norm(dim=1)

    assert (distances(0.05) > distances(0.0) + 1e-2).all()


def test_batch_scope_reaches_the_batch_alone():
    objective = perturbed(make(scope="batch", separation_weight=1.0))
    objective.penalty(batch()).backward()
    touched = objective.annotators.weight.grad.abs().amax((1, 2)) > 0
    assert touched.tolist() == [True, True, True, False]


@pytest.mark.parametrize("name", OPTIONS)
def test_omega_likelihood_and_posterior_are_the_models(name):
    objective = perturbed(make(**OPTIONS[name]))
    omega = objective.per_annotation_source(batch(), FEATURES)
    assert_close(omega, plain_omega(objective).detach())
    assert not omega.requires_grad and (0.01 < omega).all() and (omega < 0.99).all()
    if objective.noise_source.normalize_items:
        assert omega.min() > 0.268 and omega.max() < 0.732
    logits = logits_of()
    likelihood = objective.log_likelihood(logits, batch(weighted=True), FEATURES)
    assert_close(likelihood, -plain_nll(objective, logits).detach())

    expected = logits.log_softmax(1)
    for k in range(C):  # by way of a classifier that is certain of class k
        certain = torch.full((4, C), -1e4, dtype=torch.float64)
        certain[:, k] = 0
        terms = -plain_nll(objective, certain).detach() * batch(weighted=True).weight
        expected[:, k] += torch.zeros(4, dtype=torch.float64).index_add(0, torch.tensor(ITEM), terms)
    found = objective.posterior(logits, batch(weighted=True), FEATURES)
    assert_close(found, expected.softmax(1))
    assert_close(found[1], logits[1].softmax(0))


def test_confusions_are_detached_rows_of_the_true_class():
    objective = perturbed(make(num_labels=4))
    for confusion, weight in (
        (objective.confusion(), objective.annotators.weight),
        (objective.common_confusion(), objective.common),
    ):
        assert confusion.shape == weight.shape and not confusion.requires_grad
        expected = weight.detach().exp()
        assert_close(confusion, expected / expected.sum(-1, keepdim=True))


@pytest.mark.parametrize("mixing", ["logits", "probabilities"])
@pytest.mark.parametrize("num_labels", [2, 5])
def test_label_set_of_another_size(num_labels, mixing):
    objective = make(num_labels=num_labels, mixing=mixing)
    annotations = Annotations([0, 2], [0, 1], [1, num_labels - 1], num_annotators=R, num_classes=num_labels)
    logits, features = torch.randn(1, C, requires_grad=True), torch.randn(1, D)
    objective(logits, annotations, features).backward()
    assert logits.grad.abs().sum() > 0 and objective.common_confusion().shape == (C, num_labels)
    assert objective.posterior(logits, annotations, features).shape == (1, C)


def test_confident_low_precision_inputs_are_computed_in_float32():
    for mixing in ("logits", "probabilities"):
        objective = make(mixing=mixing)
        logits = logits_of(dtype=torch.bfloat16, scale=100).requires_grad_()
        features = (30 * FEATURES).bfloat16()
        loss = objective(logits, batch(), features)
        loss.backward()
        assert loss.dtype == torch.float32 and logits.grad.isfinite().all()
        assert_close(loss, objective(logits.detach().float(), batch(), features.float()))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(objective(logits, batch(), features), loss)
        low = copy.deepcopy(objective).bfloat16()
        low(logits, batch(), features).backward()
        assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in low.parameters())


def test_matrices_that_have_drifted_far_stay_finite():
    for mixing in ("logits", "probabilities"):
        objective = make(mixing=mixing)
        with torch.no_grad():
            objective.common.mul_(500)
            objective.annotators.weight.copy_(objective.common.roll(1, 1).expand(R, C, C))
        logits = (1e3 * torch.eye(C))[[0, 1, 2, 0]].requires_grad_()
        loss = objective(logits, batch(), FEATURES.float())
        loss.backward()
        assert loss.isfinite() and logits.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in objective.parameters())


# Common noise told from individual noise


def train(objective, x: Tensor, annotations: Annotations, steps: int = 300, lr: float = 0.02) -> nn.Module:
    torch.manual_seed(0)
    classifier = nn.Linear(x.shape[1], HARD)
    optimizer = torch.optim.Adam([*classifier.parameters(), *objective.parameters()], lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        objective(classifier(x), annotations, x).backward()
        optimizer.step()
    return classifier


def auc(score: Tensor, positive: Tensor) -> float:
    """Probability that a positive one scores higher than a negative one."""
    rank = torch.empty(len(score), dtype=torch.double)
    rank[score.argsort()] = torch.arange(1, len(score) + 1, dtype=torch.double)
    count = int(positive.sum())
    return (rank[positive].sum().item() - count * (count + 1) / 2) / (count * (len(score) - count))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "mixing", "error", "own_error"),
    [
        slow("asymmetric", "logits", 0.045, 0.2),  # ω within 0.27 to 0.73: matrices overshoot to make up for it
        ("asymmetric", "probabilities", 0.006, 0.04),
        slow("symmetric", "logits", 0.045, 0.2),
    ],
)
def test_tells_common_from_individual_noise_and_beats_the_vote(pattern, mixing, error, own_error):
    x, truth, made = crowd_of(pattern, seed=1)
    a = made.annotations
    test_x, test_truth, _ = crowd_of(pattern, seed=11)
    vote = train(MajorityVote(HARD, PEOPLE_IN_CROWD), x, a, steps=150)
    objective = make(HARD, PEOPLE_IN_CROWD, mixing=mixing, feature_dim=None, embedding_dim=20, hidden_dim=128)
    classifier = train(objective, x, a)
    ours = metrics.accuracy(classifier(test_x).detach(), test_truth)
    assert ours > 0.97 and ours > metrics.accuracy(vote(test_x).detach(), test_truth) + 0.1
    posterior = objective.posterior(classifier(x), a, x)
    assert metrics.accuracy(posterior, truth) > 0.99

    common, individual = objective.common_confusion(), objective.confusion()
    distance = (common - made.common).square().mean()
    assert distance < error
    assert pattern == "symmetric" or (common.t() - made.common).square().mean() > 1.5 * distance
    assert ((individual - made.common).square().mean((1, 2)) > 2 * distance).all()
    assert metrics.confusion_error(made.individual, individual) < own_error
    assert torch.corrcoef(torch.stack([individual.flatten(), made.individual.flatten()]))[0, 1] > 0.8
    omega = objective.per_annotation_source(a, x)
    assert auc(omega, made.source) > 0.9
    assert omega[made.source].mean() > omega[~made.source].mean() + 0.2
