"""CrowdModel over timm models and others: logits, features, and the backbone that comes out as it went in."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from support.attached import ATTACHED, C, R, labels, mlp
from support.compare import assert_close
from torch import Tensor, nn
from torch.nn import functional as F

from crowdnal.data import Annotations
from crowdnal.objectives import CoNAL, CrowdLayer, Objective
from crowdnal.training import CrowdModel, CrowdOutput, attach, has_single_head


class WithFeatures(Objective):
    """Records the features it is given; stands for CoNAL."""

    name = "with-features"
    needs_features = True
    seen: Tensor

    def confusion(self):
        return torch.eye(self.num_classes).expand(self.num_annotators, -1, -1).clone()

    def _loss(self, batch):
        self.seen = batch.features
        labels = batch.annotations
        return F.cross_entropy(batch.logits[labels.item], labels.label) + 0 * batch.features.sum()


def train(model: CrowdModel, images: Tensor, annotations: Annotations, steps: int = 2) -> CrowdOutput:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(images, annotations)
        output.loss.backward()
        optimizer.step()
    return output


# timm


def timm_model(name: str, num_classes: int = C, **kwargs) -> nn.Module:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return timm.create_model(name, num_classes=num_classes, **kwargs)


@pytest.mark.quick(4)
@pytest.mark.parametrize("objective", ATTACHED)
@pytest.mark.parametrize("name", ["resnet10t", "test_vit"])
def test_a_cnn_and_a_transformer_train_and_come_out_plain(name, objective):
    size = 160 if name == "test_vit" else 64
    reference = timm_model(name)
    backbone = timm_model(name, num_classes=10)
    model = attach(backbone, ATTACHED[objective](C, R))
    assert model.backbone is backbone and backbone.num_classes == C
    images = torch.randn(4, 3, size, size)
    before = copy.deepcopy(model.state_dict())
    output = train(model, images, labels(4))
    assert isinstance(output, CrowdOutput) and output.loss.dim() == 0 and output.logits.shape == (4, C)
    trained = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert {key for key, _ in model.objective.named_parameters(prefix="objective")} <= trained
    assert any(key.startswith("backbone.") for key in trained)

    model.eval()
    with torch.no_grad():
        logits = model(images)
        assert isinstance(logits, Tensor) and torch.equal(logits, backbone(images))
        assert set(backbone.state_dict()) == set(reference.state_dict())
        reference.load_state_dict(backbone.state_dict())
        assert torch.equal(reference.eval()(images), logits)
    for module in backbone.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and not module._backward_hooks


HEADS = {  # what has to be told apart -> timm model
    "linear after dropout": ("test_resnet", {"drop_rate": 0.5}, 64),
    "functional dropout": ("test_efficientnet", {"drop_rate": 0.5}, 64),
    "norm and mlp head": ("test_convnext", {"drop_rate": 0.5}, 64),
    "convolution in the head": ("mobilenetv3_small_050", {"drop_rate": 0.5}, 64),
    "token and norm": ("test_vit", {"drop_rate": 0.5}, 160),
    "windows": ("swin_tiny_patch4_window7_224", {"img_size": 56, "depths": (1, 1), "num_heads": (3, 6)}, 56),
    "two heads": ("deit_tiny_distilled_patch16_224", {"img_size": 32, "depth": 2, "drop_rate": 0.5}, 32),
    "two heads with batch norm": ("levit_128s", {}, 224),
    "own classifier module": ("repvit_m0_9", {"drop_rate": 0.5}, 64),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("head", HEADS)
def test_features_are_pre_logits_and_logits_are_the_models(head):
    name, kwargs, size = HEADS[head]
    backbone = timm_model(name, **kwargs)
    model = attach(backbone, WithFeatures(C, R))
    images = torch.randn(3, 3, size, size)
    backbone.train()
    statistics = copy.deepcopy(backbone.state_dict())
    modes = [module.training for module in backbone.modules()]
    random_state = torch.get_rng_state()
    model._confirm(images)
    assert torch.equal(random_state, torch.get_rng_state())
    assert modes == [module.training for module in backbone.modules()]
    assert all(torch.equal(value, statistics[key]) for key, value in backbone.state_dict().items())

    model.eval()
    with torch.no_grad():
        logits, features = model.logits_and_features(images)
        assert_close(logits, backbone(images))
        expected = backbone.forward_head(backbone.forward_features(images), pre_logits=True)
        assert_close(features, expected)
    assert model._single_head == (head not in ("two heads", "two heads with batch norm", "own classifier module"))

    model.train()
    output = model(images, labels(3))
    assert output.logits.shape == (3, C)
    if model._single_head:  # one pass of the head: the features seen are those behind these very logits
        assert_close(backbone.get_classifier()(model.objective.seen), output.logits)


@pytest.mark.parametrize(
    ("name", "size", "own"),
    [("lcnetv2_small", 64, "dropout"), ("shvit_s1", 64, "head.bn.weight"), ("efficientvit_m0", 128, "head.bn.weight")],
)
def test_layers_between_features_and_classifier_are_not_skipped(name, size, own):
    """They do nothing in evaluation mode before any training, in which the first batch is looked at."""
    backbone = timm_model(name, drop_rate=0.5)
    model, images = attach(backbone, WithFeatures(C, R)), torch.randn(2, 3, size, size)
    model(images, labels(2)).loss.backward()
    assert not [key for key, p in backbone.named_parameters() if p.grad is None]  # DDP stops on these
    if own == "dropout":
        for module in backbone.modules():  # the rest of the model does not depend on the random state
            if isinstance(module, nn.modules.batchnorm._BatchNorm) or "DropPath" in type(module).__name__:
                module.eval()
        with torch.no_grad():
            one, other = (model(images, labels(2)).logits for _ in range(2))
        assert not torch.allclose(one, other)
        return
    model.eval()
    with torch.no_grad():
        backbone.head.bn.running_mean.fill_(0.5)
        backbone.head.bn.running_var.fill_(0.01)
        assert_close(model(images, labels(2)).logits, model(images))


def test_dropout_between_is_no_hindrance_where_one_is_put_there_anyhow():
    backbone, images = timm_model("lcnetv2_small", drop_rate=0.5), torch.randn(2, 3, 64, 64)
    linear = timm_model("test_resnet", drop_rate=0.5)
    assert has_single_head(linear, images)
    assert has_single_head(backbone, images, dropout=False) == isinstance(
        backbone.get_classifier(), (nn.Linear, nn.Conv2d)
    )
    assert not has_single_head(backbone, images)


@pytest.mark.parametrize("name", ["resnetv2_18", "repvit_m1", "dla34", "deit_tiny_distilled_patch16_224"])
def test_the_length_of_features_is_known_before_the_first_batch(name):
    """Where the classifier is no linear layer too: EMA, DDP and optimizers want to see all parameters."""
    with torch.device("meta"):
        backbone = timm_model(name)
        model = attach(backbone, CoNAL(C, R))
        images = torch.zeros(2, *backbone.pretrained_cfg["input_size"])
        features = backbone.eval().forward_head(backbone.forward_features(images), pre_logits=True)
    assert not any(nn.parameter.is_lazy(parameter) for parameter in model.parameters())
    assert model.objective.noise_source.hidden.in_features == features.shape[1]


def test_frozen_modes_survive_the_check():
    backbone = timm_model("test_resnet")
    model = attach(backbone, WithFeatures(C, R)).train()
    backbone.bn1.eval()
    model(torch.randn(3, 3, 64, 64), labels(3))
    assert not backbone.bn1.training and backbone.training


class Scaled(nn.Module):
    """timm's interface, with something behind the classifier."""

    def __init__(self, scale_in_forward: bool) -> None:
        super().__init__()
        self.num_classes, self.scale_in_forward = C, scale_in_forward
        self.stem, self.fc = nn.Linear(5, 8), nn.Linear(8, C)

    def get_classifier(self):
        return self.fc

    def reset_classifier(self, num_classes):
        raise AssertionError("not needed")

    def forward_features(self, x):
        return self.stem(x).relu()

    def forward_head(self, x, pre_logits=False):
        if pre_logits:
            return x
        return self.fc(x) if self.scale_in_forward else 3 * self.fc(x)

    def forward(self, x):
        x = self.forward_head(self.forward_features(x))
        return 3 * x if self.scale_in_forward else x


def test_a_model_that_does_more_than_its_classifier_is_noticed():
    x = torch.randn(3, 5)
    model = attach(Scaled(False), WithFeatures(C, R))
    assert_close(model(x, labels(3)).logits, model.backbone(x))
    with pytest.raises(ValueError, match="features="):
        attach(Scaled(True), WithFeatures(C, R))(x, labels(3))
    model = attach(Scaled(True), WithFeatures(C, R), features=nn.Flatten())
    assert_close(model(x, labels(3)).logits, model.backbone(x))
    assert torch.equal(model.objective.seen, x)


def test_new_classifier_keeps_dtype_device_and_mode():
    backbone = timm_model("test_resnet", num_classes=10).double().eval()
    model = attach(backbone, CrowdLayer(C, R))
    assert backbone.get_classifier().weight.dtype == torch.float64 and not backbone.get_classifier().training
    assert model(torch.randn(2, 3, 64, 64, dtype=torch.float64)).dtype == torch.float64
    with torch.device("meta"):
        on_meta = timm_model("test_resnet", num_classes=10)
    attach(on_meta, CrowdLayer(C, R))
    assert on_meta.get_classifier().weight.is_meta


def test_headless_timm_model_gets_a_classifier_and_a_fitting_one_keeps_its_own():
    headless = timm_model("test_resnet", num_classes=0)
    assert attach(headless, CrowdLayer(C, R))(torch.randn(2, 3, 64, 64)).shape == (2, C)
    fitting = timm_model("test_resnet")
    classifier = fitting.get_classifier()
    attach(fitting, CrowdLayer(C, R))
    assert fitting.get_classifier() is classifier


def test_a_feature_length_that_does_not_fit_changes_nothing():
    model = timm_model("test_resnet", num_classes=11)
    with pytest.raises(ValueError, match="feature_dim=7"):
        attach(model, CoNAL(C, R, feature_dim=7))
    assert model.num_classes == 11 and model.get_classifier().out_features == 11
    headless = timm_model("test_resnet", num_classes=0)
    attached = attach(headless, CoNAL(C, R))
    assert attached.objective.noise_source.hidden.in_features == headless.get_classifier().in_features


def test_distilled_training_mode_is_refused_clearly():
    backbone = timm_model("deit_tiny_distilled_patch16_224", img_size=32, depth=1)
    backbone.set_distilled_training(True)
    with pytest.raises(ValueError, match=r"returned tuple but the objective needs logits \[B, 4\]"):
        attach(backbone, CrowdLayer(C, R)).train()(torch.randn(2, 3, 32, 32), labels(2))


def test_timm_ema():
    utils = pytest.importorskip("timm.utils")
    model = attach(mlp(), CrowdLayer(C, R))
    ema = utils.ModelEmaV3(model, decay=0.5)
    start = copy.deepcopy(model.state_dict())
    train(model, torch.randn(6, 5), labels(6))
    ema.update(model)
    for key, value in ema.module.state_dict().items():
        assert_close(value, (start[key] + model.state_dict()[key]) / 2)
    assert ema.module(torch.randn(2, 5)).shape == (2, C)


# any module


def test_any_module_with_dense_targets():
    model = attach(mlp(), CrowdLayer(C, R))
    x = torch.randn(3, 5)
    dense = labels(3).to_dense()
    assert_close(model(x, dense).loss, model(x, labels(3)).loss)
    assert torch.equal(model(x, dense).logits, model(x))


def test_where_features_come_from():
    x = torch.randn(3, 5)
    with pytest.raises(ValueError, match=r"return \(logits, features\), or use attach\(model, objective, features="):
        attach(mlp(), WithFeatures(C, R))(x, labels(3))
    model = attach(mlp(), WithFeatures(C, R), features=lambda images: images.flatten(1))
    model(x, labels(3))
    assert torch.equal(model.objective.seen, x)

    extra = attach(mlp(), WithFeatures(C, R), features=nn.Linear(5, 2))
    assert extra(x, labels(3)).loss.isfinite() and "features.weight" in extra.state_dict()

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(5, 8), nn.Linear(8, C)

        def forward(self, images):
            hidden = self.body(images)
            return self.head(hidden), hidden

    model = attach(Pair(), WithFeatures(C, R))
    output = model(x, labels(3))
    assert_close(model.objective.seen, model.backbone(x)[1])
    assert torch.equal(output.logits, model(x))
    assert attach(Pair(), CrowdLayer(C, R))(x, labels(3)).loss.isfinite()


def test_errors():
    with pytest.raises(TypeError, match="model is str"):
        attach("resnet50", CrowdLayer(C, R))
    with pytest.raises(TypeError, match="objective is CrossEntropyLoss"):
        attach(mlp(), nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match="num_classes=10 but the objective was made for 4"):
        attach(mlp(), CrowdLayer(C, R), num_classes=10)
    model = attach(mlp(outputs=7), CrowdLayer(C, R))
    for arguments in ((torch.randn(2, 5),), (torch.randn(2, 5), labels(2))):
        with pytest.raises(ValueError, match=r"Sequential returned \[2, 7\] but the objective needs logits \[B, 4\]"):
            model(*arguments)
    with pytest.raises(ValueError, match="3 rows but annotations has 2 items"):
        attach(mlp(), CrowdLayer(C, R))(torch.randn(3, 5), labels(2))


def test_copies_and_state():
    model = attach(mlp(), CrowdLayer(C, R))
    clone = copy.deepcopy(model)
    train(model, torch.randn(6, 5), labels(6))
    assert not torch.equal(clone.objective.confusion(), model.objective.confusion())
    clone.load_state_dict(model.state_dict())
    x = torch.randn(3, 5)
    assert torch.equal(clone(x, labels(3)).loss, model(x, labels(3)).loss)
    objective = CrowdLayer(C, R)
    objective.load_state_dict(model.objective.state_dict())
    assert torch.equal(objective.confusion(), model.objective.confusion())
