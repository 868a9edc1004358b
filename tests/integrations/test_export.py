"""What was trained with an objective leaves as any other model does: torch.export and ONNX."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.compare import assert_close
from torch import Tensor, nn

import crowdnal
from crowdnal import Annotations
from crowdnal.objectives import Objective

timm = pytest.importorskip("timm")
C, R, B, D = 3, 5, 6, 32


def trained(name: str, objective: Objective) -> crowdnal.CrowdModel:
    """After a few steps, in evaluation mode."""
    torch.manual_seed(0)
    options = {"img_size": D} if "vit" in name else {}
    model = crowdnal.attach(timm.create_model(name, num_classes=C, **options), objective)
    optimizer = torch.optim.SGD(crowdnal.param_groups(model, 0.05))
    annotations = Annotations.from_dense(torch.randint(-1, C, (B, R)), num_classes=C)
    for _ in range(3):
        optimizer.zero_grad()
        model(images(B), annotations).loss.backward()
        optimizer.step()
    return model.eval()


def images(size: int) -> Tensor:
    return torch.randn(size, 3, D, D, generator=torch.Generator().manual_seed(size))


def exported(module: nn.Module) -> torch.export.ExportedProgram:
    """For batches of any size."""
    return torch.export.export(module, (images(2),), dynamic_shapes=({0: torch.export.Dim("batch")},))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_the_backbone_is_exported(name: str, tmp_path: Path) -> None:
    model = trained(name, crowdnal.CoNAL(C, R))
    torch.export.save(exported(model.backbone), tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    for size in (2, 5):
        assert_close(program(images(size)), model(images(size)), atol=1e-5)


def test_a_model_whose_objective_predicts_is_exported_with_it() -> None:
    """DoctorNets predict with their heads, which the backbone does not have."""
    model = trained("test_resnet", crowdnal.DoctorNet(C, R))
    found = exported(model).module()(images(4))
    assert_close(found, model(images(4)), atol=1e-5)
    assert not torch.allclose(found, model.backbone(images(4)), atol=1e-2)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "whole"), [("test_resnet", False), ("test_vit", False), ("test_resnet", True)])
def test_onnx_gives_the_same_logits(name: str, whole: bool, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = trained(name, crowdnal.DoctorNet(C, R) if whole else crowdnal.CrowdLayer(C, R))
    file = tmp_path / "model.onnx"
    torch.onnx.export(
        model if whole else model.backbone, (images(2),), file, dynamo=True, input_names=["images"],
        output_names=["logits"], dynamic_shapes=({0: torch.export.Dim("batch")},),
    )  # fmt: skip
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for size in (2, 5):
        (logits,) = session.run(None, {"images": images(size).numpy()})
        assert isinstance(logits, np.ndarray)
        assert_close(torch.from_numpy(logits), model(images(size)).detach(), atol=1e-4)
