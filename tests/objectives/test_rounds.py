"""Rounds of EM: targets by item, history, checkpoints, and the callback that serves them in a plain loop."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from support.attached import C, R, labels, mlp
from support.compare import assert_close
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import crowdnal
from crowdnal import Annotations, CrowdDataset, ObjectiveCallback
from crowdnal.objectives import Batch, RoundsObjective, TraceRegularized

N = 30
IMAGES = torch.randn(N, 5, generator=torch.Generator().manual_seed(1))


class Sharpened(RoundsObjective):
    """A round's targets are the classifier's probabilities, squared; its likelihood the number of rounds so far."""

    name = "sharpened"
    models_annotators = False

    def _round(self, batch: Batch) -> float:
        assert not batch.logits.requires_grad and batch.annotations.num_items == len(batch.logits)
        self._set_targets((2 * batch.logits).softmax(1))
        return float(len(self.history))

    def _log_likelihood(self, batch: Batch) -> Tensor:
        return batch.logits.log_softmax(1)[batch.annotations.item, batch.annotations.label]

    def _posterior(self, batch: Batch) -> Tensor:
        return batch.logits.softmax(1)


class Featured(Sharpened):
    needs_features = True

    def _round(self, batch: Batch) -> float:
        self.seen = batch.features
        return super()._round(batch)


def targets_of(a: Annotations) -> Tensor:
    votes = a.votes()
    return torch.where(votes.sum(1, keepdim=True) > 0, votes / votes.sum(1, keepdim=True), 1 / C)


def loader(annotations: Annotations, **options: Any) -> DataLoader[Any]:
    dataset = CrowdDataset(TensorDataset(IMAGES[: len(annotations)]), annotations)
    return DataLoader(dataset, **{"batch_size": 8, "collate_fn": crowdnal.collate, **options})


def trained(objective: RoundsObjective, **options: Any) -> ObjectiveCallback:
    return ObjectiveCallback(crowdnal.attach(mlp(), objective), loader(labels(N), **options))


def test_first_targets_are_the_shares_of_the_votes() -> None:
    a = Annotations([0, 3, 3, 5], [0, 1, 2, 0, 1], [1, 1, 0, 3, 2], num_annotators=R, num_classes=C,
                    weight=[1.0, 1.0, 2.0, 0.0, 3.0])  # fmt: skip
    objective = Sharpened(C, R)
    objective.on_train_start(a)
    assert objective.targets.tolist() == [[0.5, 0.5, 0, 0], [0.25] * 4, [0, 0, 1, 0]]
    wide = Sharpened(C, R, num_labels=7)
    wide.on_train_start(Annotations([0, 1], [0], [6], num_annotators=R, num_classes=7))
    assert wide.targets.tolist() == [[0.25] * 4]


@pytest.mark.parametrize("every", [1, 3])
def test_rounds_are_made_when_they_are_due(every: int) -> None:
    callback = trained(Sharpened(C, R, epochs_per_round=every))
    objective = callback.model.objective
    for epoch in range(7):
        callback.on_epoch_start(epoch)
        expected = (2 * callback.predict()[0]).softmax(1) if epoch >= every else targets_of(labels(N))
        assert_close(objective.targets, expected)
        callback.on_epoch_end(epoch)
    assert [(r.round, r.epoch) for r in callback.history] == [(n + 1, e) for n, e in enumerate(range(every, 7, every))]
    assert [r.log_likelihood for r in callback.history] == list(range(len(callback.history)))
    assert all(r.seconds is not None and r.seconds > 0 for r in callback.history)


def test_a_batch_has_the_targets_of_its_items() -> None:
    a, objective = labels(N), Sharpened(C, R, reduction="none")
    objective.on_train_start(a)
    logits = torch.randn(N, C)
    expected = -(targets_of(a) * logits.log_softmax(1)).sum(1) * (a.counts > 0)
    assert_close(objective(logits, a), expected)
    rows = torch.tensor([17, 3, 29, 3])
    assert_close(objective(logits[rows], a[rows]), expected[rows])
    assert objective(logits[:0], a[:0]).shape == (0,)
    for reduction, value in (("sum", expected.sum()), ("mean", expected.sum() / (a.counts > 0).sum())):
        objective.reduction = reduction
        assert_close(objective(logits, a), value)


def test_items_of_a_part_of_a_data_set_keep_their_targets() -> None:
    """item_id follows a selection; the rows of the targets are found through it."""
    whole = labels(N)
    part = whole[torch.tensor([20, 4, 11, 28, 7])]
    objective = Sharpened(C, R, reduction="none")
    objective.on_train_start(part)
    batch = part[[3, 0]]
    assert_close(objective._rows(batch), targets_of(whole)[[28, 20]])
    for bad, message in ((whole[[5]], "item 0 is 5, which is none of the 5"), (whole[[4, 29]], "item 1 is 29")):
        with pytest.raises(ValueError, match=f"item_id of {message}"):
            objective(torch.zeros(len(bad), C), bad)
    with pytest.raises(ValueError, match="item_id 4 occurs more than once"):
        Sharpened(C, R).on_train_start(whole[[4, 9, 4]])


def test_errors_say_what_to_call() -> None:
    a, objective = labels(N), Sharpened(C, R)
    with pytest.raises(RuntimeError, match="Sharpened has no targets yet: before the first epoch call on_train_start"):
        objective(torch.zeros(N, C), a)
    with pytest.raises(ValueError, match="annotations have 6 annotators and 4 classes, expected are 7 and 4"):
        Sharpened(C, R + 1).on_train_start(a)
    objective.on_train_start(a)
    with pytest.raises(RuntimeError, match="needs all annotations and predictions in every round"):
        objective.on_epoch_start(1)
    dense = torch.full((3, R), -1)
    with pytest.raises(ValueError, match="no item_id and 3 items, but the training set has 30"):
        objective(torch.zeros(3, C), dense)
    for value in (0, 1.5, True):
        with pytest.raises(ValueError, match=f"epochs_per_round={value}"):
            Sharpened(C, R, epochs_per_round=value)  # type: ignore[arg-type]


def test_state_goes_through_a_checkpoint_and_resumes() -> None:
    callback = trained(Sharpened(C, R))
    for epoch in range(3):
        callback.on_epoch_start(epoch)
    stream = io.BytesIO()
    torch.save(callback.model.state_dict(), stream)
    stream.seek(0)
    again = trained(Sharpened(C, R))
    again.model.load_state_dict(torch.load(stream, weights_only=True))
    assert [r[:3] for r in again.history] == [r[:3] for r in callback.history] and len(again.history) == 2
    targets = again.model.objective.targets
    assert torch.equal(targets, callback.model.objective.targets)
    for one in (callback, again):
        one.on_epoch_start(3)
    assert [r[:3] for r in again.history] == [r[:3] for r in callback.history]
    assert torch.equal(again.model.objective.targets, callback.model.objective.targets)


def test_start_keeps_what_was_loaded_and_begins_anew_otherwise() -> None:
    a, objective = labels(N), Sharpened(C, R)
    objective.on_train_start(a)
    objective._set_targets(torch.full((N, C), 0.25))
    state = objective.state_dict()
    fresh = Sharpened(C, R)
    fresh.load_state_dict(state)
    fresh.on_train_start(a)
    assert torch.equal(fresh.targets, torch.full((N, C), 0.25))
    fresh.on_train_start(a)  # another training: nothing was loaded for it
    assert_close(fresh.targets, targets_of(a))
    fresh.load_state_dict(state)
    with pytest.raises(ValueError, match="annotations has 5 items but the targets in use are of 30"):
        fresh.on_train_start(labels(5))
    with pytest.raises(ValueError, match="targets in use are of 0"):
        Sharpened(C, R).on_train_resume(a)


def test_a_copy_has_the_targets_and_not_the_run() -> None:
    callback = trained(Sharpened(C, R))
    callback.on_epoch_start(0)
    twin = copy.deepcopy(callback.model.objective)
    assert torch.equal(twin.targets, callback.model.objective.targets)
    with pytest.raises(RuntimeError, match="on_train_resume"):
        twin.on_epoch_start(1)
    callback.on_epoch_start(1)


# The callback


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        self.head = nn.Linear(6, C)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(images)
        return self.head(features), features


def test_predictions_are_those_of_evaluation_in_item_order() -> None:
    torch.manual_seed(0)
    model = crowdnal.attach(Net(), Featured(C, R))
    model.train()
    model.backbone.body[1].eval()  # type: ignore[union-attr, operator]
    callback = ObjectiveCallback(model, loader(labels(N), shuffle=True))
    callback.on_epoch_start(0)
    state, buffers = torch.get_rng_state(), copy.deepcopy(dict(model.named_buffers()))
    logits, features = callback.predict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    assert model.training and model.backbone.body[2].training and not model.backbone.body[1].training  # type: ignore
    with torch.no_grad():
        model.eval()
        expected = model.backbone(IMAGES)
    assert_close((logits, features), expected)
    callback.on_epoch_start(1)
    assert_close(model.objective.seen, expected[1])


@pytest.mark.parametrize("wrap", ["list", "subset", "permuted"])
def test_loaders_of_other_kinds(wrap: str) -> None:
    """Annotations are gathered in a pass where the loader has no CrowdDataset."""
    a = labels(N)
    rows = torch.arange(N) if wrap == "list" else torch.tensor([9, 3, 22, 14, 7, 1, 0])
    batches: Any = loader(a)
    if wrap == "list":
        batches = [({"x": IMAGES[part]}, a[part]) for part in rows.flip(0).split(7)]
    elif wrap == "subset":
        batches = DataLoader(Subset(batches.dataset, rows.tolist()), batch_size=3, collate_fn=crowdnal.collate)
    else:
        batches = DataLoader(CrowdDataset(TensorDataset(IMAGES[rows]), a[rows]), collate_fn=crowdnal.collate)
    inputs = mlp()
    if wrap == "list":

        class FromDict(nn.Module):
            def forward(self, images: dict[str, Tensor]) -> Tensor:
                return inputs(images["x"])

        net: nn.Module = FromDict()
    else:
        net = inputs
    callback = ObjectiveCallback(crowdnal.attach(net, Sharpened(C, R)), batches)
    callback.on_epoch_start(0)
    order = torch.sort(rows).values if wrap == "subset" else rows
    assert_close(callback.predict()[0], inputs(IMAGES[order]).detach())
    assert_close(callback.model.objective.targets, targets_of(a)[order])
    callback.on_epoch_start(1)
    assert_close(callback.model.objective._rows(a[order]), callback.model.objective.targets)


def test_the_callback_refuses() -> None:
    model, a = crowdnal.attach(mlp(), Sharpened(C, R)), labels(N)
    with pytest.raises(TypeError, match="model is Sequential"):
        ObjectiveCallback(mlp(), [])
    callback = ObjectiveCallback(model, loader(a, drop_last=True))
    callback.on_epoch_start(0)
    with pytest.raises(ValueError, match="gave 24 of the 30 items of the training set, item 24 not.*drop_last=False"):
        callback.on_epoch_start(1)
    with pytest.raises(ValueError, match=r"gave a list that is no \(images, annotations\)"):
        ObjectiveCallback(model, DataLoader(TensorDataset(IMAGES)), a).predict()
    with pytest.raises(ValueError, match="a batch of 3 items has no item_id"):
        ObjectiveCallback(
            model, [(IMAGES[:3], Annotations([0] * 4, [], [], num_annotators=R, num_classes=C))], a
        ).predict()


def test_it_serves_every_objective_wrapped_or_not() -> None:
    model = crowdnal.attach(mlp(), TraceRegularized(C, R, warmup_epochs=1))
    wrapped = torch.nn.DataParallel(torch.compile(model, backend="eager"))
    callback = ObjectiveCallback(wrapped, loader(labels(N)), amp=torch.bfloat16)
    assert callback.model is model and callback.history == []
    for epoch, warming in ((0, True), (1, False)):
        callback.on_epoch_start(epoch)
        assert model.objective._in_warmup is warming
    assert callback.predict()[0].dtype == torch.float32
