"""Predictions of all items, the head of a timm model, and the callback that begins by itself or when told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import assert_close
from torch import Tensor, nn

import crowdnal
from crowdnal import Annotations
from crowdnal.functional.segments import distinct
from crowdnal.training import classify, has_single_head, pre_logits, predict_items

C, D = 3, 4


class Net(nn.Module):
    """Gives logits and features, with dropout and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.drop, self.head = nn.BatchNorm1d(D), nn.Dropout(0.5), nn.Linear(D, C)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.drop(self.norm(x))
        return self.head(features), features


def model(objective: str = "conal") -> crowdnal.CrowdModel:
    options = {"feature_dim": D} if objective == "conal" else {}
    return crowdnal.attach(Net(), crowdnal.objectives.create(objective, num_classes=C, num_annotators=2, **options))


def test_rows_are_where_they_belong_and_the_model_as_it_was() -> None:
    made, x = model(), torch.randn(7, D, generator=torch.Generator().manual_seed(1))
    made.train()
    made.backbone.norm.eval()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    state = torch.get_rng_state()
    order = torch.tensor([3, 0, 6, 2, 5])
    logits, features = predict_items(made, [(rows, x[rows]) for rows in order.split(2)], 7)
    assert torch.equal(torch.get_rng_state(), state) and made.training and not made.backbone.norm.training
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    wanted, given = made.eval().backbone(x)
    assert features is not None and not logits.requires_grad
    assert_close(logits[order], wanted[order])
    assert_close(features[order], given[order])
    assert not logits[[1, 4]].any() and not features[[1, 4]].any()  # no batch had them


@pytest.mark.parametrize("objective", ["conal", "crowd-layer"])
def test_dtypes_and_nothing(objective: str) -> None:
    x, rows = torch.randn(4, D), torch.arange(4)
    made = model(objective)
    mixed, features = predict_items(made, [(rows, x)], 4, amp=torch.bfloat16)
    assert mixed.dtype == torch.float32 and (features is None) == (objective == "crowd-layer")
    plain = predict_items(made, [(rows, x)], 4)[0]
    assert not torch.equal(mixed, plain)
    assert_close(mixed, plain, rtol=0.1, atol=0.1)
    assert predict_items(made.double(), [(rows, x.double())], 4)[0].dtype == torch.float64
    empty, features = predict_items(made, [], 0)
    assert empty.shape == (0, C) and features is None


def test_weights_that_autocast_keeps_still_learn() -> None:
    """Autocast keeps what it cast without a gradient: an outer region would train nothing."""
    made, x = model("crowd-layer"), torch.randn(4, D)
    with torch.autocast("cpu", torch.bfloat16):
        predict_items(made, [(torch.arange(4), x)], 4, amp=torch.bfloat16)
        made(x).sum().backward()
    assert made.backbone.head.weight.grad is not None


class Recorder(crowdnal.MajorityVote):
    def __init__(self) -> None:
        super().__init__(C, 2)
        self.calls: list[tuple[str, Any]] = []

    def on_train_start(self, annotations: Any = None, predict: Any = None) -> None:
        self.calls.append(("start", predict()))

    def on_train_resume(self, annotations: Any = None, predict: Any = None) -> None:
        self.calls.append(("resume", predict()))


@pytest.mark.parametrize(("epoch", "hook"), [(0, "start"), (2, "resume")])
def test_the_callback_begins_once(epoch: int, hook: str) -> None:
    a = Annotations([0, 1, 2], [0, 1], [0, 1], num_annotators=2, num_classes=C)
    x = torch.randn(2, D)
    loader = torch.utils.data.DataLoader(crowdnal.CrowdDataset(x, a), collate_fn=crowdnal.collate)
    objective = Recorder()
    callback = crowdnal.ObjectiveCallback(crowdnal.attach(Net(), objective), loader)
    callback.begin(epoch, lambda: (torch.ones(2, C), None))
    callback.on_epoch_start(epoch)
    (call,) = objective.calls
    assert call[0] == hook and torch.equal(call[1][0], torch.ones(2, C))
    own = Recorder()
    callback = crowdnal.ObjectiveCallback(crowdnal.attach(Net(), own), loader)
    callback.on_epoch_start(epoch)
    assert_close(own.calls[0][1][0], callback.model.eval()(x))


# The head of a timm model


@pytest.mark.parametrize(
    ("name", "single"),
    [
        ("test_resnet", True),
        ("test_vit", True),
        ("test_efficientnet", True),
        ("deit_tiny_distilled_patch16_224", False),
    ],
)
def test_a_single_head_is_seen(name: str, single: bool) -> None:
    timm = pytest.importorskip("timm")
    size = 224 if "deit" in name else 32
    extra = {"img_size": 32} if name == "test_vit" else {}
    torch.manual_seed(0)
    made = timm.create_model(name, num_classes=5, drop_rate=0.5, **extra).train()
    images = torch.randn(2, 3, size, size)
    assert has_single_head(made, images) is single and made.training
    if single:
        made.eval()
        assert_close(classify(made.get_classifier(), pre_logits(made, images)), made(images))


def test_a_head_that_is_a_convolution_or_is_not_the_output() -> None:
    class Model(nn.Module):
        num_classes = C

        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor, self.head = factor, nn.Conv2d(D, C, 1)

        def get_classifier(self) -> nn.Module:
            return self.head

        def forward_features(self, x: Tensor) -> Tensor:
            return x

        def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
            return x.mean((2, 3)) if pre_logits else self.factor * self.head(x).mean((2, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.forward_head(self.forward_features(x))

    x = torch.randn(2, D, 3, 3)
    assert has_single_head(Model(1.0), x) and not has_single_head(Model(2.0), x)


# Who is in a batch


def test_distinct_keys() -> None:
    key = torch.tensor([5, 2, 5, 0, 2, 5])
    values, slot = distinct(key, key.argsort(stable=True), 8)
    assert values.tolist() == [0, 2, 5, 0, 0, 0] and slot.tolist() == [2, 1, 2, 0, 1, 2]
    assert torch.equal(values[slot], key)
    values, slot = distinct(key, key.argsort(stable=True), 3)  # no more slots than keys there are
    assert values.tolist() == [0, 2, 5]
    values, slot = distinct(key[:0], key[:0], 8)
    assert values.shape == slot.shape == (0,)
