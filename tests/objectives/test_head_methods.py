"""DL-CL_Over, UnionNet, DoctorNet, WDN and Max-MIG: what is special to each, planted crowds, the command."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.compare import assert_close
from support.heads import ITEM, MAKERS, D, features_of, head_probs, make
from support.memory import Largest
from support.planted import annotate, blobs, fit, planted
from support.small_crowd import ANNOTATOR, LABEL, C, R, batch, logits_of, perturbed
from torch import Tensor, nn

from crowdnal.data import Annotations
from crowdnal.metrics import confusion_error
from crowdnal.objectives import (
    Batch,
    CrowdLayer,
    DoctorNet,
    MajorityVote,
    OverparametrizedCrowdLayer,
    UnionNet,
    WeightedDoctorNet,
    doctor_net,
    union_net,
)
from crowdnal.training import attach

# DL-CL_Over


def test_over_starts_as_crowd_layer():
    logits = logits_of(dtype=torch.float32)
    over, plain = OverparametrizedCrowdLayer(C, R), CrowdLayer(C, R)
    assert_close(over(logits, batch()), plain(logits, batch()))
    assert_close(over.confusion(), plain.confusion())


def test_over_does_not_grow_with_annotators():
    objective = OverparametrizedCrowdLayer(C, 50_000).requires_grad_(False)
    few = Annotations([0, 3], [3, 49_999, 3], [0, 1, 1], num_annotators=50_000, num_classes=C).prepare()
    with Largest() as largest:
        objective(torch.randn(1, C, requires_grad=True), few).backward()
    assert largest.elements <= 100


# UnionNet


@pytest.mark.parametrize("name", ["union A", "mig"])
def test_start_from_the_votes(name):
    objective = MAKERS[name](C, R, init="votes")
    annotations = batch()
    objective.on_train_start(annotations)
    counts, total = torch.zeros(R, C, C), torch.zeros(R, C)
    votes = annotations.votes()
    for i, r, y in zip(ITEM, ANNOTATOR, LABEL, strict=True):
        counts[r, :, y] += votes[i] / votes[i].sum()
        total[r] += votes[i] / votes[i].sum()
    matrices = torch.where(total[..., None] > 0, counts / total.clamp(min=1e-9)[..., None], 1 / C)
    offset = 1e-5 if name == "union A" else 1e-2
    assert_close(objective.annotators.weight.detach().transpose(1, 2), (matrices + offset).log())
    other = MAKERS[name](C, R, init="identity")
    before = other.confusion()
    other.on_train_start(annotations)
    assert torch.equal(other.confusion(), before) and (before.argmax(-1) == torch.arange(C)).all()


def test_union_a_in_blocks_is_the_same(monkeypatch):
    inputs = [logits_of().requires_grad_(), features_of()]
    results = []
    for block in (4096, 5):
        monkeypatch.setattr(union_net, "_BLOCK", block)
        objective = make("union A")
        loss = objective(inputs[0], batch(), None)
        results.append((loss, *torch.autograd.grad(loss, [inputs[0], *objective.parameters()])))
    assert_close(*results)


@pytest.mark.parametrize("variant", ["A", "B"])
def test_union_builds_no_tensor_of_items_annotators_and_labels(variant):
    items, annotators, classes = 64, 4000, 8
    objective = UnionNet(classes, annotators, variant=variant)
    labels = torch.randint(0, classes, (items,)).tolist()
    one_each = Annotations(range(items + 1), range(items), labels, num_annotators=annotators, num_classes=classes)
    logits = torch.randn(items, classes, requires_grad=True)
    with Largest() as largest:
        objective(logits, one_each.prepare()).backward()
    assert largest.elements <= max(items * 4096, annotators * classes * classes) < items * annotators * classes / 4


@pytest.mark.parametrize("name", ["union A", "union B"])
def test_union_likelihood_is_given_who_labels(name):
    objective, logits = make(name), logits_of()
    log_union = -torch.stack([terms_of_all(objective, logits, r, y) for r in range(R) for y in range(C)], 1)
    log_union = log_union.view(4, R, C)
    expected = log_union.log_softmax(-1)[ITEM, ANNOTATOR, LABEL]
    assert_close(objective.log_likelihood(logits, batch(True)), expected.detach())


def terms_of_all(objective: UnionNet, logits: Tensor, r: int, y: int) -> Tensor:
    """Loss [B] of annotator r giving label y to every item."""
    everywhere = Annotations(range(5), [r] * 4, [y] * 4, num_annotators=R, num_classes=C)
    return objective._nll(Batch(logits, everywhere, None, None, "none"))


# Max-MIG


def test_max_mig_forecaster_and_prior():
    objective, logits = make("mig prior"), logits_of()
    log_g = objective.aggregate(batch())
    expected = (logits.log_softmax(-1) + log_g - objective.prior_logits.log_softmax(0)).softmax(-1)
    assert_close(objective.posterior(logits, batch()), expected.detach())
    objective.on_train_start(batch())
    votes = torch.tensor([2.0, 2.0, 2.0], dtype=torch.float64) + 1
    assert_close(objective.prior_logits.softmax(0).detach(), votes / votes.sum())
    fixed = make("mig")
    fixed.on_train_start(batch())
    assert not fixed.prior_logits.requires_grad


# DoctorNet and WDN


@pytest.mark.parametrize("heads", ["separate", "residual"])
def test_doctor_net_predicts_the_mean_of_the_heads(heads, monkeypatch):
    objective = perturbed(DoctorNet(C, R, feature_dim=D, heads=heads))
    logits, x = logits_of(), features_of()
    mean = head_probs(objective, logits, x).mean(1)
    assert_close(objective.predict(logits, x), mean.log())
    assert_close(objective.posterior(logits, batch(), x), mean.detach())
    monkeypatch.setattr(doctor_net, "_BLOCK", 2 * C)
    monkeypatch.setattr(doctor_net, "_ITEMS", 3)
    assert_close(objective.predict(logits, x), mean.log())
    start = DoctorNet(C, R, feature_dim=D, heads=heads)
    if heads == "residual":
        assert_close(start.predict(logits.float(), x.float()), logits.float().log_softmax(-1))
    else:
        assert start.weight.std() > 0.1 and start.weight.abs().max() <= 1 / math.sqrt(D)
    with pytest.raises(RuntimeError, match="empirical_confusion"):
        start.confusion()
    with pytest.raises(ValueError, match=r"features is \[4, 4\].*feature_dim=5"):
        start(logits.float(), batch(), x[:, 1:].float())
    with pytest.raises(ValueError, match="size of the features"):
        DoctorNet(C, R)(logits.float(), batch(), x.float())


def test_separate_heads_ignore_the_classifier_even_where_it_is_not_finite():
    objective = DoctorNet(C, R, feature_dim=D, heads="separate")
    logits = torch.full((4, C), float("inf"), requires_grad=True)
    loss = objective(logits, batch(), features_of(dtype=torch.float32))
    loss.backward()
    assert loss.isfinite() and (logits.grad == 0).all()


class TwoHeaded(nn.Module):
    """A classifier that gives its features too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classifier = nn.Linear(2, D), nn.Linear(D, C)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).relu()
        return self.classifier(hidden), hidden


def test_an_attached_model_predicts_with_the_heads():
    torch.manual_seed(0)
    model = attach(TwoHeaded(), DoctorNet(C, R, feature_dim=D))
    assert model.objective.weight.shape == (R, D + 1, C)
    with pytest.raises(ValueError, match="length 4.*feature_dim=5"):
        model.objective.set_feature_dim(4)
    x = torch.randn(4, 2)
    logits, hidden = model.backbone(x)
    assert_close(model(x), model.objective.predict(logits, hidden))
    output = model(x, batch())
    assert_close(output.logits, model(x))
    output.loss.backward()
    assert model.backbone.body.weight.grad.abs().sum() > 0
    assert torch.equal(attach(TwoHeaded(), CrowdLayer(C, R)).objective.confusion(), CrowdLayer(C, R).confusion())


def test_attach_sizes_the_heads_of_a_timm_model():
    timm = pytest.importorskip("timm")
    for name in ("test_resnet", "test_vit"):
        model = attach(timm.create_model(name, num_classes=C), DoctorNet(C, R))
        image = torch.randn(4, 3, 160, 160)
        model(image, batch()).loss.backward()
        assert model(image).shape == (4, C)


def prolific() -> tuple[Tensor, Tensor, Annotations, Annotations]:
    """Two who always say 0 label everything, eight good ones a sixth each: votes are wrong, most heads are right."""
    x, truth = blobs(900)
    good = torch.full((C, C), 0.05) + 0.85 * torch.eye(C)
    lazy = torch.tensor([0.94, 0.03, 0.03]).expand(C, C)
    confusion = torch.stack([lazy] * 2 + [good] * 8)
    everything = annotate(truth, confusion, 10)
    keep = (everything.annotator < 2) | (torch.rand(9000, generator=torch.Generator().manual_seed(3)) < 1 / 6)
    item = everything.item[keep]
    indptr = torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(item, minlength=900).cumsum(0)])
    sparse = Annotations(indptr, everything.annotator[keep], everything.label[keep], num_annotators=10, num_classes=C)
    return x, truth, sparse, everything


@pytest.mark.parametrize("heads", ["separate", "residual"])
def test_doctor_net_finds_each_annotators_confusion_and_beats_majority_vote(heads):
    x, truth, annotations, _ = prolific()
    torch.manual_seed(0)
    hidden = torch.cat([x, x.square(), x[:, :1] * x[:, 1:]], 1)
    objective, classifier = DoctorNet(C, 10, feature_dim=D, heads=heads), nn.Linear(2, C)
    optimizer = torch.optim.Adam([*classifier.parameters(), *objective.parameters()], lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        objective(classifier(x), annotations, hidden).backward()
        optimizer.step()
    right = (objective.predict(classifier(x), hidden).argmax(-1) == truth).float().mean()
    majority = (fit(MajorityVote(C, 10), x, annotations)(x).argmax(-1) == truth).float().mean()
    assert right > 0.95 and right > majority + 0.3
    good, lazy = 0.05 + 0.85 * torch.eye(C), torch.tensor([0.94, 0.03, 0.03]).expand(C, C)
    with torch.no_grad():  # an annotator's head, averaged over the items of a class, is the row of their confusion
        probs = head_probs(objective, classifier(x), hidden)
    estimate = torch.stack([probs[truth == k].mean(0) for k in range(C)], 1)
    assert confusion_error(torch.stack([lazy] * 2 + [good] * 8), estimate) < 0.02


def test_weighted_doctor_net_learns_weights_with_the_rest_frozen():
    """Eight who know and two who say 0, all of them everywhere: the weights go to those who explain the labels."""
    x, truth = blobs(300)
    good = 0.02 + 0.94 * torch.eye(C)
    lazy = torch.tensor([0.94, 0.03, 0.03]).expand(C, C)
    annotations = annotate(truth, torch.stack([lazy] * 3 + [good] * 7), 10)
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(2, D), nn.Tanh())
    objective = WeightedDoctorNet(C, 10, feature_dim=D, head_epochs=100)
    classifier = nn.Linear(D, C)
    with pytest.raises(RuntimeError, match="on_epoch_start"):
        objective(classifier(backbone(x)), annotations, backbone(x))
    parameters = [*backbone.parameters(), *classifier.parameters(), *objective.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.0)
    states = []
    for epoch in range(200):
        objective.on_epoch_start(epoch)
        if epoch == 100:
            assert torch.equal(objective.averaging_weights(), torch.full((10,), 0.1))
            states = [p.detach().clone() for p in parameters]
            before = objective.log_likelihood(classifier(backbone(x)), annotations, backbone(x)).mean()
        hidden = backbone(x)
        optimizer.zero_grad()
        objective(classifier(hidden), annotations, hidden).backward()
        optimizer.step()
    changed = [not torch.equal(p, q) for p, q in zip(parameters, states, strict=True)]
    assert changed == [p is objective.averaging for p in parameters]
    weights = objective.averaging_weights()
    assert_close(weights.sum(), torch.tensor(1.0))
    assert weights[3:].sum() > 0.65
    assert objective.log_likelihood(classifier(backbone(x)), annotations, backbone(x)).mean() > before
    assert (objective.predict(classifier(backbone(x)), backbone(x)).argmax(-1) == truth).float().mean() > 0.95


# Planted crowds

PAPERS = {"over": {"confusion_prior": None}, "over softmax": {"confusion_prior": None}, "union A": {"init": "votes"}}
PAPERS |= {"union B": {"init": "votes"}, "mig": {"init": "votes", "class_prior": "votes"}}
RECOVERED = {"over": 0.006, "over softmax": 0.006, "union A": 0.006, "union B": 0.006, "mig": 0.04}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", RECOVERED)
def test_recovers_planted_confusions_and_beats_majority_vote(name):
    x, truth = blobs()
    confusion = planted()
    annotations = annotate(truth, confusion, 5)
    objective = MAKERS[name](C, len(confusion), **PAPERS[name])
    objective.on_train_start(annotations)
    start = confusion_error(confusion, objective.confusion())
    classifier = fit(objective, x, annotations)
    test_x, test_truth = blobs(seed=5)

    def accuracy(model: nn.Module) -> float:
        return (model(test_x).argmax(-1) == test_truth).float().mean().item()

    estimate = objective.confusion()
    error = confusion_error(confusion, estimate)
    reliability = confusion.diagonal(dim1=1, dim2=2).mean(-1)
    correlation = torch.corrcoef(torch.stack([objective.reliability(), reliability]))[0, 1]
    found = (objective.posterior(classifier(x), annotations).argmax(-1) == truth).float().mean()
    majority = accuracy(fit(MajorityVote(C, len(confusion)), x, annotations))
    assert accuracy(classifier) > 0.95 and accuracy(classifier) > majority + 0.2
    assert error < RECOVERED[name] < start
    assert (estimate.transpose(1, 2) - confusion).square().sum((1, 2)).mean() / C > 3 * error  # not its transpose
    assert correlation > 0.95 and found > 0.95


# The command line


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["crowd-layer-over", "union-net", "doctor-net", "weighted-doctor-net", "max-mig"])
def test_crowdnal_train(name, tmp_path):
    pytest.importorskip("timm")
    from support import small_run

    root = small_run.write(tmp_path)
    options = {"weighted-doctor-net": ("head_epochs=3",), "crowd-layer-over": ("rank=2",)}.get(name, ())
    config = small_run.frozen(root, tmp_path / name, objective=name, options=options, holdout=0.2, epochs=6, amp=True)
    result = small_run.go(config)
    history = small_run.read(tmp_path / name / "history.csv")
    assert len(history) == 6 and history["train_loss"].astype(float).diff().iloc[1:3].max() < 0.5
    if name == "weighted-doctor-net":
        assert result.objective.averaging_weights().std() > 0
    if name == "doctor-net":  # random start of the heads: seeded
        small_run.go(replace(config, out=tmp_path / "again"))
        assert small_run.same_weights(config.out, tmp_path / "again")
        assert result.metrics["objective"].startswith("DoctorNet") and result.estimates.from_model is False
