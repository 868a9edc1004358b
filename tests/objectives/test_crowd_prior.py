"""The prior of confusions that gradients train: where they begin, what it adds to the loss, how far it holds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.compare import assert_close
from torch import Tensor

import crowdnal
from crowdnal import Annotations, metrics, objectives, simulation
from crowdnal.objectives import ConfusionObjective

C, R, ITEMS = 3, 6, 40
MATRICES = ["crowd-layer", "crowd-layer-over", "trace", "geocrowdnet", "conal"]


def crowd(per_item: int = 3, seed: int = 0) -> Annotations:
    truth = torch.arange(ITEMS) % C
    confusions = simulation.symmetric_confusions(R, C, torch.linspace(0.5, 0.9, R))
    return simulation.simulate(truth, confusions, annotations_per_item=per_item, seed=seed)


def begun(name: str, annotations: Annotations, **options: Any) -> ConfusionObjective:
    torch.manual_seed(0)
    given = {"feature_dim": 4} if name == "conal" else {}
    given |= {"trace_weight": 0.0} if name == "trace" else {}
    given |= {"volume_weight": 0.0} if name == "geocrowdnet" else {}
    given |= {"separation_weight": 0.0} if name == "conal" else {}
    objective = objectives.create(name, num_classes=C, num_annotators=R, **given, **options)
    objective.on_train_start(annotations)
    assert isinstance(objective, ConfusionObjective)
    return objective.double()


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(ITEMS, size, generator=generator, dtype=torch.float64) for size in (C, 4))  # type: ignore[return-value]


@pytest.mark.parametrize("name", MATRICES)
def test_everyone_begins_like_the_crowd(name: str) -> None:
    a = crowd()
    found = crowdnal.dawid_skene(a)
    assert found.pseudo_counts is not None
    crowds = found.pseudo_counts / found.pseudo_counts.sum(1, keepdim=True)
    right = float(crowds.diagonal() @ found.class_prior)
    mean = (crowds + simulation.symmetric_confusions(1, C, right)[0]) / 2  # in half of it all mistakes are alike
    objective = begun(name, a)
    assert_close(objective.confusion().double(), mean.expand(R, C, C), rtol=1e-4, atol=1e-4)
    # and the loss is that of the mixture of the crowd's rows, in proportions p: for conal that of its common part
    if name != "conal":
        logits, _ = inputs()
        p = (logits.softmax(1) @ mean)[a.item, a.label]
        assert_close(objective(logits, a), -p.log().mean(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MATRICES)
def test_the_prior_is_in_the_loss(name: str) -> None:
    """A label's part of Σ_k crowd[k] · (log mean[k] - log row[k]), over all labels of its annotator, in the mean."""
    a = crowd()
    objective = begun(name, a, confusion_prior=4.0)
    with torch.no_grad():
        for parameter in objective.annotators.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)).double()
    assert objective.crowd is not None
    assert_close(objective.crowd.sum(1), torch.full((C,), 4.0, dtype=torch.float64), rtol=1e-5)
    x = inputs()
    each = copy.deepcopy(objective)
    each.reduction = "none"
    mean = objective.crowd / 4
    distance = (objective.crowd * (mean.log() - objective.confusion().double().log())).sum((1, 2))
    share = distance / torch.bincount(a.annotator, minlength=R)
    assert float(distance.min()) > 0
    wanted = each(x[0], a, x[1]).mean() + share[a.annotator].mean()
    assert_close(objective(x[0], a, x[1]), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["crowd-layer", "conal"])
def test_single_labels_tell_nothing_of_annotators(name: str) -> None:
    objective, x = begun(name, crowd(per_item=1)), inputs()
    objective(x[0], crowd(per_item=1), x[1]).backward()
    assert not objective.annotators.weight.grad.any()  # type: ignore[union-attr]


def test_more_labels_move_further() -> None:
    """Two annotators with the same share of mistakes: whose labels are tenfold is farther from the crowd."""
    items, few = 600, 20
    truth = torch.arange(items) % 2
    dense = torch.full((items, 6), -1)
    for r in range(4):
        dense[:, r] = truth
    for r, count in ((4, items), (5, few)):
        dense[:count, r] = torch.where(torch.arange(count) % 4 < 2, 1 - truth[:count], truth[:count])
    a = Annotations.from_dense(dense, num_classes=2)
    objective = objectives.create("crowd-layer", num_classes=2, num_annotators=6, confusion_prior=20.0)
    objective.on_train_start(a)
    logits = 8.0 * (torch.nn.functional.one_hot(truth, 2) - 0.5)
    optimizer = torch.optim.Adam(objective.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        objective(logits, a).backward()
        optimizer.step()
    right = metrics.reliability(objective.confusion())
    assert right[4] < 0.6 and 0.65 < right[5] < 0.85 and bool((right[:4] > 0.85).all())


def test_a_checkpoint_goes_on_and_a_second_start_keeps_what_was_learnt() -> None:
    a, x = crowd(), inputs()
    first = begun("crowd-layer", a)
    with torch.no_grad():
        first.annotators.weight.add_(0.5 * torch.eye(C))  # type: ignore[union-attr]
    second = objectives.create("crowd-layer", num_classes=C, num_annotators=R).double()
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(x[0], a), first(x[0], a))
    second.on_train_start(a)
    assert torch.equal(second(x[0], a), first(x[0], a))


def test_without_a_prior_it_is_the_papers() -> None:
    a, x = crowd(), inputs()
    paper = begun("crowd-layer", a, confusion_prior=None)
    assert_close(paper(x[0], a), -x[0].softmax(1).log_softmax(1)[a.item, a.label].mean())
    for options in ({"rank": 1}, {"num_labels": C + 1}):
        other = objectives.create("crowd-layer", num_classes=C, num_annotators=R, **options)
        assert other.crowd is None and torch.equal(other.confusion().argmax(2), torch.arange(C).expand(R, C))
    with pytest.raises(ValueError, match=r"\[C, K\]"):
        objectives.create("crowd-layer", num_classes=C, num_annotators=R, confusion_prior=torch.ones(R, C, C))


ONE_PASS: list[tuple[str, dict[str, Any]]] = [
    ("crowd-layer", {}),
    ("crowd-layer", {"reduction": "per_item", "class_weight": [1.0, 2.0, 0.5]}),
    ("crowd-layer", {"groups": [0, 0, 1, 1, 1, 2]}),
    ("crowd-layer", {"sparse_grad": True}),
    ("crowd-layer", {"label_smoothing": 0.1}),
    ("trace", {}),
    ("trace", {"normalization": "softmax", "reduction": "sum"}),
    ("geocrowdnet", {"reduction": "item_mean"}),
    ("single-confusion", {"penalty_weight": 0.0, "focal": 1.0}),
    ("conal", {}),
    ("conal", {"mixing": "probabilities"}),
]


@pytest.mark.parametrize("per_item", [3, 1])
@pytest.mark.parametrize(("name", "options"), ONE_PASS)
def test_one_pass_is_the_likelihood_and_the_prior_alone(
    name: str, options: dict[str, Any], per_item: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where single labels tell nothing of annotators."""
    a = crowd(per_item)
    objective = begun(name, a, confusion_prior=4.0, **options)
    with torch.no_grad():
        for parameter in objective.annotators.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)).double()
    assert objective.fuses_prior
    found = []
    for fused in (True, False):
        monkeypatch.setattr(type(objective), "fuses_prior", fused)
        objective.zero_grad(set_to_none=True)
        logits, features = (x.requires_grad_() for x in inputs())
        loss = objective(logits, a, features)
        loss.backward()
        gradients = [p.grad for p in objective.parameters() if p.grad is not None]
        found.append([loss.detach(), logits.grad, *(g.to_dense() if g.is_sparse else g for g in gradients)])
    assert len(found[0]) == len(found[1]) > 2
    for ours, wanted in zip(*found, strict=True):
        assert_close(ours, wanted)


def test_a_likelihood_of_ones_own_has_the_prior_added() -> None:
    class Halved(objectives.CrowdLayer):
        def _nll(self, batch: Any) -> Tensor:
            return super()._nll(batch) / 2

    a, (logits, _) = crowd(), inputs()
    assert not Halved.fuses_prior and objectives.CrowdLayer.fuses_prior
    own, whole = (kind(C, R, confusion_prior=4.0) for kind in (Halved, objectives.CrowdLayer))
    for objective in (own, whole):
        objective.on_train_start(a)
        objective.double()
        with torch.no_grad():
            objective.annotators.weight.copy_(torch.arange(R * C * C).sin().reshape(R, C, C))  # type: ignore[union-attr]
    likelihood = -whole.log_likelihood(logits, a).mean()
    assert_close(own(logits, a), whole(logits, a) - likelihood / 2)
