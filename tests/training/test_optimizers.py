"""What optimizers read off an attached model: who is decayed, at which rate, and in which layer."""

from __future__ import annotations

import pytest
import torch
from support.attached import C, R, labels, mlp
from support.compare import assert_close
from torch import nn

import crowdnal
from crowdnal.training import attach


def settings(model: nn.Module, optimizer: torch.optim.Optimizer, key: str) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: group[key] for group in optimizer.param_groups for p in group["params"]}


def vit() -> nn.Module:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=C)


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_timms_groups_are_those_of_the_backbone_and_spare_the_objective(layer_decay: float | None) -> None:
    backbone = vit()
    create = pytest.importorskip("timm.optim").create_optimizer_v2
    model = attach(backbone, crowdnal.CoNAL(C, R))
    options = {"opt": "adamw", "lr": 1e-3, "weight_decay": 0.05, "layer_decay": layer_decay}
    alone, attached = create(backbone, **options), create(model, **options)
    for key in ("weight_decay", "lr_scale") if layer_decay else ("weight_decay",):
        of_all = settings(model, attached, key)
        own = {name: value for name, value in of_all.items() if name.startswith("objective.")}
        assert set(own.values()) == {0.0 if key == "weight_decay" else 1.0} and len(own) > 3
        rest = {name.removeprefix("backbone."): value for name, value in of_all.items() if name not in own}
        assert rest == settings(backbone, alone, key)
    assert settings(model, attached, "weight_decay")["backbone.pos_embed"] == 0.0


def test_param_groups() -> None:
    backbone = vit()
    model = attach(backbone, crowdnal.CrowdLayer(C, R))
    backbone.patch_embed.requires_grad_(False)
    optimizer = torch.optim.AdamW(crowdnal.param_groups(nn.DataParallel(model), 1e-3, 0.05, objective_lr=0.5))
    decay, rate = (settings(model, optimizer, key) for key in ("weight_decay", "lr"))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(decay) == trained == {n for n, _ in model.named_parameters() if "patch_embed" not in n}
    assert rate.pop("objective.annotators.weight") == 0.5 and set(rate.values()) == {1e-3}
    decayed = {name for name, value in decay.items() if value}
    assert decayed == {
        name
        for name, p in model.named_parameters()
        if p.ndim > 1 and name.startswith(("backbone.blocks", "backbone.head."))
    }
    assert set(decay.values()) == {0.0, 0.05}
    assert crowdnal.param_groups(model, 1e-3)[-1]["lr"] == 1e-3
    with pytest.raises(TypeError, match="Linear but must be what crowdnal.attach returned"):
        crowdnal.param_groups(nn.Linear(2, 2), 1e-3)


def test_an_annotator_without_labels_stays_at_its_init_under_weight_decay() -> None:
    model = attach(mlp(), crowdnal.CrowdLayer(C, R))
    optimizer = torch.optim.AdamW(crowdnal.param_groups(model, 1e-3, 0.5))
    x, a = torch.randn(6, 5), labels(6)
    silent = a.select(a.annotator != 2)
    for _ in range(3):
        model(x, silent).loss.backward()
        optimizer.step()
    assert torch.equal(model.objective.annotators.weight[2], torch.eye(C))
    assert not torch.equal(model.objective.annotators.weight[1], torch.eye(C))


def test_what_timm_reads_of_a_model_is_the_backbones() -> None:
    backbone = vit()
    model = attach(backbone, crowdnal.CrowdLayer(C, R))
    for name in ("pretrained_cfg", "default_cfg", "num_classes", "num_features", "head_hidden_size"):
        assert getattr(model, name) is getattr(backbone, name)
    data = pytest.importorskip("timm.data").resolve_model_data_config(model)
    assert data == pytest.importorskip("timm.data").resolve_model_data_config(backbone)
    model.set_grad_checkpointing(True)
    assert backbone.grad_checkpointing
    plain = attach(mlp(), crowdnal.CrowdLayer(C, R))
    for name in ("pretrained_cfg", "group_matcher", "set_grad_checkpointing"):
        assert not hasattr(plain, name)
    assert plain.no_weight_decay() == {"objective.annotators.weight"}


def test_gradient_checkpointing_changes_nothing() -> None:
    backbone = vit()
    model = attach(backbone, crowdnal.CoNAL(C, R))
    x, a = torch.randn(3, 3, 32, 32), labels(3)
    found = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(x, a).loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert_close(found[1], found[0])
