"""CrossFit: what an objective is told of an item comes from a copy that never saw the item's labels."""

from __future__ import annotations

import copy

import pytest
import torch
from support.compare import assert_close
from torch import Tensor, nn

import crowdnal
from crowdnal import CrossFit, simulation
from crowdnal.data import Annotations
from crowdnal.objectives import (
    OBJECTIVES,
    CrowdLayer,
    DoctorNet,
    FeatureEM,
    MajorityVote,
    Objective,
    RoundsObjective,
    create,
)
from crowdnal.training import ObjectiveCallback, attach, batch_shares

C, D, N, R = 3, 6, 30, 4
BEFORE = ("dl-aggregate", "dl-ds", "dl-wc", "feature-em", "lia-ml")  # targets of all labels before training; tags
ROUNDS = [name for name, cls in OBJECTIVES.items() if issubclass(cls, RoundsObjective) and name not in BEFORE]


def crowd(seed: int = 0) -> tuple[Tensor, Annotations]:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.arange(N) % C
    x = torch.eye(C, D)[truth] + 0.5 * torch.randn(N, D, generator=generator)
    confusions = simulation.symmetric_confusions(R, C, 0.8)
    return x, simulation.simulate(truth, confusions, annotations_per_item=3, seed=seed)


def relabelled(a: Annotations, item: int) -> Annotations:
    """With other labels on one item."""
    dense = a.to_dense(missing=-1)
    dense[item] = torch.where(dense[item] >= 0, (dense[item] + 1) % C, -1)
    return Annotations.from_dense(dense, num_classes=C)


def head(drop: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Dropout(drop), nn.Linear(8, C))


def objective(name: str = "dl-em") -> Objective:
    torch.manual_seed(0)
    found = create(name, num_classes=C, num_annotators=R)
    found.set_feature_dim(D)
    return found


def fitted(
    x: Tensor,
    a: Annotations,
    name: str = "dl-em",
    *,
    epochs: int = 2,
    drop: float = 0.0,
    lr: float = 0.1,
    folds: int = 5,
) -> tuple[crowdnal.CrowdModel, ObjectiveCallback]:
    """By SGD, in batches of nine."""
    model = attach(CrossFit(head(drop), a), objective(name), features=nn.Identity())
    callback = ObjectiveCallback(model, [(x, a[torch.arange(len(x))])], a)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        callback.on_epoch_start(epoch)
        model.train()
        for rows in torch.randperm(len(x)).split(9):
            optimizer.zero_grad()
            model(x[rows], a[rows]).loss.backward()
            optimizer.step()
        callback.on_epoch_end(epoch)
    return model, callback


@pytest.mark.parametrize("name", ROUNDS)
def test_the_score_of_an_item_does_not_know_its_labels(name: str) -> None:
    """Bit for bit before the first round, after which they tell through the confusions of who gave them."""
    x, a = crowd()
    item = 7
    found = [fitted(x, given, name, epochs=1, drop=0.5)[1].predict()[0] for given in (a, relabelled(a, item))]
    if name not in ("cmm", "lia"):  # whose init is a clustering of all labels, a network of all annotators
        assert torch.equal(found[0][item], found[1][item])
    others = torch.arange(N) != item
    assert not torch.equal(found[0][others], found[1][others])


def test_a_network_that_trained_on_all_does_know_them() -> None:
    """What the test above would see."""
    x, a = crowd()
    found = []
    for given in (a, relabelled(a, 7)):
        model = attach(head(), objective())
        callback = ObjectiveCallback(model, [(x, given[torch.arange(N)])], given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        callback.on_epoch_start(0)
        for rows in torch.arange(N).split(9):
            optimizer.zero_grad()
            model(x[rows], given[rows]).loss.backward()
            optimizer.step()
        found.append(callback.predict()[0][7])
    assert not torch.equal(*found)


@pytest.mark.parametrize("name", ["dl-em", "mbem"])
def test_rounds_are_made_from_out_of_fold_scores(name: str) -> None:
    x, a = crowd()
    model, callback = fitted(x, a, name, epochs=1)
    told, _ = callback.predict()
    crossfit = model.backbone
    scores = crossfit.scores(x)
    assert_close(told, scores[crossfit.fold, torch.arange(N)])
    assert not torch.allclose(told, model(x))
    other = copy.deepcopy(model.objective)
    other.on_train_resume(a, lambda: (told, None))
    rounds = model.objective.epochs_per_round
    for each in (model.objective, other):
        each.on_epoch_start(rounds)
    assert torch.equal(model.objective.targets, other.targets)


def test_each_copy_learns_as_it_would_alone() -> None:
    x, a = crowd()
    model, _ = fitted(x, a, "majority-vote")
    crossfit = model.backbone
    for k in range(5):
        alone = attach(head(), MajorityVote(C, R))
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for _ in range(2):
            for rows in torch.randperm(N).split(9):
                kept = rows[crossfit.fold[rows] != k]
                optimizer.zero_grad()
                alone(x[kept], a[kept]).loss.backward()
                optimizer.step()
        assert_close(list(crossfit.copies[k].parameters()), list(alone.backbone.parameters()), atol=1e-6)


def test_the_objective_learns_from_the_mean_of_the_copies() -> None:
    x, a = crowd()
    model = attach(CrossFit(head(), a, folds=2), CrowdLayer(C, R))
    model(x, a[torch.arange(N)]).loss.backward()
    found = [p.grad.clone() for p in model.objective.parameters()]
    model.zero_grad()
    fold = model.backbone.fold
    parts = [(fold != k).nonzero()[:, 0] for k in range(2)]
    losses = [model.objective(model.backbone.copies[k](x[rows]), a[rows]) for k, rows in enumerate(parts)]
    torch.stack(losses).mean().backward()
    assert_close(found, [p.grad for p in model.objective.parameters()])


def test_the_logits_beside_a_loss_are_out_of_fold_and_those_of_images_the_mean() -> None:
    x, a = crowd()
    model, callback = fitted(x, a)
    model.eval()
    assert_close(model(x, a[torch.arange(N)]).logits, callback.predict()[0])
    assert_close(model(x), torch.stack([each(x) for each in model.backbone.copies]).mean(0))


def test_linear_copies_are_one_classifier() -> None:
    x, a = crowd()
    crossfit = CrossFit(nn.Linear(D, C), a)
    for each in crossfit.copies:
        nn.init.normal_(each.weight)
    one = nn.Linear(D, C)
    one.load_state_dict(crossfit.averaged())
    assert_close(one(x), crossfit(x), atol=1e-6)


def test_folds_are_dealt_by_seed_evenly_and_by_id() -> None:
    _, a = crowd()
    folds = [CrossFit(head(), a, seed=seed).fold for seed in (0, 0, 1)]
    assert torch.equal(folds[0], folds[1]) and not torch.equal(folds[0], folds[2])
    assert torch.bincount(folds[0]).tolist() == [6] * 5
    named = Annotations.from_dense(a.to_dense(missing=-1), num_classes=C, items=[f"i{n}" for n in range(N)])
    crossfit = CrossFit(head(), named)
    assert torch.equal(crossfit.fold_of(named[[4, 2]]), crossfit.fold[[4, 2]])
    streamed = Annotations.from_dense(named.to_dense(missing=-1)[4:5], num_classes=C, items=["i4"])
    assert torch.equal(crossfit.fold_of(streamed), crossfit.fold[4:5])
    with pytest.raises(ValueError, match="no item_id and 1 items, but CrossFit was given 30"):
        crossfit.fold_of(Annotations.from_dense(a.to_dense(missing=-1)[:1], num_classes=C))


def test_fewer_items_than_folds_and_an_annotator_in_one_fold_only() -> None:
    x, a = crowd()
    model, callback = fitted(x[:3], a[:3], epochs=3)
    assert callback.predict()[0].isfinite().all() and model(x).isfinite().all()
    dense = a.to_dense(missing=-1)
    fold = CrossFit(head(), a).fold
    dense[fold != 2, R - 1] = -1
    few = Annotations.from_dense(dense, num_classes=C)
    model, callback = fitted(x, few, epochs=3)
    assert model.objective.confusion().isfinite().all() and callback.predict()[0].isfinite().all()


def test_a_resumed_run_has_the_same_bits() -> None:
    x, a = crowd()

    def train(model: crowdnal.CrowdModel, optimizer: torch.optim.Optimizer, epochs: range) -> None:
        callback = ObjectiveCallback(model, [(x, a[torch.arange(N)])], a)
        for epoch in epochs:
            torch.manual_seed(epoch)
            callback.on_epoch_start(epoch)
            model.train()
            for rows in torch.randperm(N).split(9):
                optimizer.zero_grad()
                model(x[rows], a[rows]).loss.backward()
                optimizer.step()

    def made(seed: int) -> tuple[crowdnal.CrowdModel, torch.optim.Optimizer]:
        model = attach(CrossFit(head(0.5), a, seed=seed), objective())
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    whole, stopped, resumed = made(0), made(0), made(1)  # the folds are those of the state
    train(*whole, range(4))
    train(*stopped, range(2))
    for own, given in zip(resumed, stopped, strict=True):
        own.load_state_dict(copy.deepcopy(given.state_dict()))
    train(*resumed, range(2, 4))
    assert_close(resumed[0].state_dict(), whole[0].state_dict(), atol=0, rtol=0)


def test_it_helps_where_a_network_repeats_its_labels() -> None:
    """Posteriors of a network that memorises: in-sample they stay with the votes."""
    x, truth = _memorised()
    confusions = simulation.symmetric_confusions(20, C, 0.55)
    a = simulation.simulate(truth, confusions, annotations_per_item=2, seed=0)
    right = {}
    for crossed in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, C))
        model = attach(CrossFit(net, a) if crossed else net, crowdnal.DLEM(C, 20, epochs_per_round=15))
        callback = ObjectiveCallback(model, [(x, a[torch.arange(len(x))])], a)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for epoch in range(46):
            callback.on_epoch_start(epoch)
            for rows in torch.randperm(len(x)).split(50):
                optimizer.zero_grad()
                model(x[rows], a[rows]).loss.backward()
                optimizer.step()
        right[crossed] = float((model.objective.targets.argmax(1) == truth).double().mean())
    assert right[True] > right[False] + 0.03, right


def _memorised() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(300) % C
    return 1.5 * torch.eye(C, 30)[truth] + torch.randn(300, 30, generator=generator), truth


def test_what_it_cannot_part_is_refused() -> None:
    x, a = crowd()
    crossfit = CrossFit(head(), a)
    with pytest.raises(ValueError, match="DoctorNet predicts with heads of its own"):
        attach(crossfit, DoctorNet(C, R))
    with pytest.raises(ValueError, match="FeatureEM needs features, which the copies of CrossFit each have"):
        attach(crossfit, FeatureEM(C, R))
    with pytest.raises(ValueError, match="reduction='none'"):
        attach(crossfit, CrowdLayer(C, R, reduction="none"))
    with pytest.raises(ValueError, match="folds=1"):
        CrossFit(head(), a, folds=1)
    with pytest.raises(ValueError, match="model is a CrossFit"):
        batch_shares(attach(crossfit, CrowdLayer(C, R)), [a])
    with pytest.raises(ValueError, match="item_id of item 0 is 30"):
        other = a[[0]]
        other.item_id = torch.tensor([30])
        crossfit.fold_of(other)
