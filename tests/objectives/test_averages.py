"""Averages of weights (EMA, SWA) that are made where everyone makes them, before training, on every objective."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import assert_same
from support.objectives import CASES, Case, D
from support.small_crowd import C, R
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import crowdnal
from crowdnal.objectives import CMM, DLEM, RoundsObjective

N = 12
IMAGES = torch.randn(N, D, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(-1, C, (N, R), generator=torch.Generator().manual_seed(2))
LABELS[3] = -1
HALF = get_ema_multi_avg_fn(0.5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(D), nn.Linear(D, C)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.norm(images)
        return self.head(features), features


def timm_average(model: nn.Module, **options: Any) -> Any:
    return pytest.importorskip("timm").utils.ModelEmaV3(model, decay=0.5, **options)


AVERAGES: dict[str, Callable[[nn.Module], Any]] = {
    "torch, buffers": lambda model: AveragedModel(model, multi_avg_fn=HALF, use_buffers=True),
    "torch, parameters": lambda model: AveragedModel(model, multi_avg_fn=HALF),
    "timm": timm_average,
    "timm, one by one": lambda model: timm_average(model, foreach=False),
}


def model_of(objective: crowdnal.Objective) -> crowdnal.CrowdModel:
    torch.manual_seed(0)
    return crowdnal.attach(Net(), objective)


def batches() -> DataLoader[Any]:
    annotations = crowdnal.Annotations.from_dense(LABELS, num_classes=C)
    return DataLoader(crowdnal.CrowdDataset(IMAGES, annotations), 4, collate_fn=crowdnal.collate)


def train(model: crowdnal.CrowdModel, loader: Any, average: Any, epochs: range, callback: Any = None) -> Any:
    callback = crowdnal.ObjectiveCallback(model, loader) if callback is None else callback
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in epochs:
        callback.on_epoch_start(epoch)
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            model(*batch).loss.backward()
            optimizer.step()
            update(average, model)
        callback.on_epoch_end(epoch)
    return callback


def update(average: Any, model: nn.Module) -> None:
    getattr(average, "update_parameters", getattr(average, "update", None))(model)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
@pytest.mark.parametrize("kind", ["torch, buffers", "timm"])
def test_an_average_made_before_training(kind: str, case: Case) -> None:
    model, loader = model_of(case.fresh(items=N).float()), batches()
    average = AVERAGES[kind](model)
    train(model, loader, average, range(3))
    averaged, objective = average.module.eval(), average.module.objective
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    assert {name: value.shape for name, value in averaged.state_dict().items()} == wanted
    weight, latest = averaged.backbone.head.weight, model.backbone.head.weight
    trained = case.options.get("heads") != "separate"
    assert weight.isfinite().all() and (torch.equal(weight, latest) != trained)
    assert averaged(IMAGES).isfinite().all()
    if isinstance(objective, RoundsObjective):
        assert torch.equal(objective.targets, model.objective.targets)
        assert objective.history == model.objective.history
    if objective.models_annotators:
        assert torch.allclose(objective.confusion().sum(-1), torch.ones(R, C))
    whole = loader.dataset.annotations
    features = averaged.backbone(IMAGES)[1] if objective.needs_features else None
    assert objective.posterior(averaged.backbone(IMAGES)[0], whole, features).isfinite().all()


@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("name", ["dl-em", "cmm", "conal-em annotation", "lia", "crowd-layer"])
def test_an_average_is_resumed(name: str, kind: str) -> None:
    made = [model_of(CASES[name].fresh(items=N).float()) for _ in range(2)]
    (model, again), loader = made, batches()
    average, other = AVERAGES[kind](model), AVERAGES[kind](again)
    callback = train(model, loader, average, range(2))
    stream = io.BytesIO()
    torch.save([model.state_dict(), average.module.state_dict()], stream)
    stream.seek(0)
    states = torch.load(stream, weights_only=True)
    again.load_state_dict(states[0])
    other.module.load_state_dict(states[1])
    if hasattr(other, "n_averaged"):
        other.n_averaged.copy_(average.n_averaged)
    train(model, loader, average, range(2, 4), callback)
    train(again, loader, other, range(2, 4))
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    if not isinstance(model.objective, RoundsObjective):
        assert_same(dict(other.module.state_dict()), dict(average.module.state_dict()))
    assert_same(dict(other.module.backbone.state_dict()), dict(average.module.backbone.state_dict()))


# A copy follows what was empty when it was made


def test_a_copy_follows_until_it_begins_a_run_of_its_own() -> None:
    a = batches().dataset.annotations
    objective, logits = DLEM(C, R), torch.randn(N, C)
    early = copy.deepcopy(objective)
    wide = copy.deepcopy(objective).double()
    second = copy.deepcopy(early)
    objective.on_train_start(a, lambda: (logits, None))
    late = copy.deepcopy(objective)
    objective.on_epoch_start(1)
    for one in (early, second):
        assert torch.equal(one.targets, objective.targets) and len(one.history) == 1
    assert wide.targets.dtype == torch.float64 and torch.equal(wide.targets, objective.targets.double())
    assert not torch.equal(late.targets, objective.targets) and late.history == []  # a copy of what there was
    early.on_train_start(a[[0, 1, 2]], lambda: (logits[:3], None))
    assert early.targets.shape == (3, C) and early.history == [] and objective.targets.shape == (N, C)
    state = {name: value.clone() for name, value in early.state_dict().items()}
    second.load_state_dict(state)
    assert torch.equal(second.targets, early.targets) and objective.targets.shape == (N, C)
    early.on_epoch_start(1)
    assert second.history == [] and torch.equal(second.targets, state["targets"])


def test_a_pickle_follows_nobody() -> None:
    objective = CMM(C, R, num_groups=2)
    copied = copy.deepcopy(objective)
    a = batches().dataset.annotations
    objective.on_train_start(a, lambda: (torch.zeros(N, C), None))
    alone, twin = pickle.loads(pickle.dumps(copied)), pickle.loads(pickle.dumps(objective))
    objective.on_epoch_start(1)
    assert len(copied.membership) == R and len(alone.membership) == len(twin.membership) == 0
    assert alone.targets.shape == twin.targets.shape == (N, C)


def test_no_buffer_comes_or_changes_size() -> None:
    for name, case in CASES.items():
        objective = case.fresh(items=N).float()
        before = [(key, value.shape) for key, value in objective.named_buffers()]
        model = model_of(objective)
        crowdnal.ObjectiveCallback(model, batches()).on_epoch_start(0)
        assert [(key, value.shape) for key, value in objective.named_buffers()] == before, name


def test_the_state_says_what_it_misses() -> None:
    objective = CMM(C, R)
    state = dict(objective.state_dict())
    del state["membership"]
    with pytest.raises(RuntimeError, match='Missing key.*"membership"'):
        CMM(C, R).load_state_dict(state)
    assert CMM(C, R).load_state_dict(state, strict=False).missing_keys == ["membership"]
    wrong = {**objective.state_dict(), "targets": torch.zeros(3, C + 1)}
    with pytest.raises(RuntimeError, match=r"size mismatch for targets: \[3, 4\] in the state, \[0, 3\] here"):
        CMM(C, R).load_state_dict(wrong)
    with pytest.raises(RuntimeError, match='Unexpected key.*"other"'):
        CMM(C, R).load_state_dict({**objective.state_dict(), "other": torch.zeros(1)})
