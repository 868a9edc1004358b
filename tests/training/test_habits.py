"""What people do around a step: precisions, memory formats, other optimizers, averages, copies, files, exports."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.attached import C, R, labels
from support.compare import assert_close
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import crowdnal
from crowdnal.training import CrowdModel, attach

N = 8
A = labels(N)
X = torch.randn(N, 3, 6, 6, generator=torch.Generator().manual_seed(0))
OBJECTIVES: dict[str, Callable[[], crowdnal.Objective]] = {
    "crowd-layer": lambda: crowdnal.CrowdLayer(C, R),
    "trace": lambda: crowdnal.TraceRegularized(C, R),
    "conal": lambda: crowdnal.CoNAL(C, R, feature_dim=4),
    "dl-em": lambda: crowdnal.DLEM(C, R),
}


class Net(nn.Module):
    """Logits and features of pictures."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(4, C)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(images)
        return self.head(features), features


def begun(name: str, dtype: torch.dtype = torch.float32) -> CrowdModel:
    torch.manual_seed(1)
    model = attach(Net(), OBJECTIVES[name]()).to(dtype)
    model.objective.on_train_start(A, lambda: (torch.zeros(N, C), torch.zeros(N, 4)))
    return model


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("how", ["autocast bfloat16", "autocast float16 and a scaler", "bfloat16", "channels_last"])
def test_precisions_and_formats_are_near_the_plain_step(name: str, how: str) -> None:
    plain, other = begun(name), begun(name, torch.bfloat16 if how == "bfloat16" else torch.float32)
    expected = gradients(plain, plain(X, A).loss)
    if how == "bfloat16":
        loss = other(X.bfloat16(), A).loss
        assert loss.dtype == torch.float32
        found = gradients(other, loss)
    elif how == "channels_last":
        other = other.to(memory_format=torch.channels_last)
        found = gradients(other, other(X.to(memory_format=torch.channels_last), A).loss)
        assert_close(found, expected, rtol=1e-4, atol=1e-6)
    else:
        dtype = torch.bfloat16 if "bfloat16" in how else torch.float16
        with torch.autocast("cpu", dtype):
            loss = other(X, A).loss
        if dtype == torch.float16:
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            optimizer = torch.optim.SGD(other.parameters(), 0.0)
            other.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            found = {key: p.grad.clone() for key, p in other.named_parameters() if p.grad is not None}
        else:
            found = gradients(other, loss)
    assert set(found) == set(expected)
    near = 0.2 if how == "bfloat16" else 0.1  # all weights and the prior rounded to three digits
    for key, value in expected.items():
        assert float((found[key] - value).norm()) < near * float(value.norm()) + 1e-3, key


def closure_of(model: CrowdModel, optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    def closure() -> float:
        optimizer.zero_grad()
        loss = model(X, A).loss
        loss.backward()
        return float(loss.detach())

    return closure


@pytest.mark.parametrize("name", OBJECTIVES)
def test_lbfgs_sam_and_clipping_lower_the_loss(name: str) -> None:
    with torch.no_grad():
        start = float(begun(name)(X, A).loss)
    model = begun(name)
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
    lbfgs.step(closure_of(model, lbfgs))
    assert float(model(X, A).loss.detach()) < start

    model = begun(name)
    sgd = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(5):  # SAM: the gradient at the worst point nearby
        closure_of(model, sgd)()
        moves = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        norm = torch.stack([move.norm() for move in moves]).norm()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move, alpha=float(0.01 / norm))
        closure_of(model, sgd)()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move, alpha=float(0.01 / norm))
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) > 0
        sgd.step()
    assert float(model(X, A).loss.detach()) < start


@pytest.mark.parametrize("name", ["crowd-layer", "trace", "conal"])
def test_averaged_weights_are_the_averages(name: str) -> None:
    model = begun(name)
    averaged = AveragedModel(model)
    optimizer = torch.optim.SGD(crowdnal.param_groups(model, 0.1), lr=0.1)
    seen = []
    for _ in range(3):
        closure_of(model, optimizer)()
        optimizer.step()
        averaged.update_parameters(model)
        seen.append({key: value.clone() for key, value in model.named_parameters()})
    for key, value in averaged.module.named_parameters():
        assert_close(value, torch.stack([state[key] for state in seen]).mean(0))
    assert averaged(X).shape == (N, C)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_copies_and_files_are_the_model(name: str, tmp_path: Path) -> None:
    model = begun(name)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    closure_of(model, optimizer)()
    optimizer.step()
    expected = model(X, A).loss
    torch.save(model.state_dict(), tmp_path / "state.pt")
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    other = [attach(Net(), OBJECTIVES[name]()) for _ in range(2)]
    other[0].load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    other[1].load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), *other):
        copied.objective.on_train_resume(A, None)
        assert torch.equal(copied(X, A).loss, expected)


def test_the_backbone_is_exported_as_if_nothing_had_been_attached() -> None:
    model = begun("conal").eval()
    program = torch.export.export(model.backbone, (X,), dynamic_shapes=({0: torch.export.Dim("items", min=2)},))
    stream = io.BytesIO()
    torch.export.save(program, stream)
    stream.seek(0)
    loaded = torch.export.load(stream).module()
    with torch.no_grad():
        assert_close(loaded(X[:3]), model.backbone(X[:3]))
    assert not any("objective" in name for name in program.state_dict)


def test_a_run_resumed_within_an_epoch_has_the_same_bits() -> None:
    """Model, optimizer, and the batches that are left."""
    batches = torch.arange(N).split(2)

    def run(model: CrowdModel, optimizer: torch.optim.Optimizer, parts: list[tuple[int, Tensor]]) -> None:
        callback = crowdnal.ObjectiveCallback(model, [(X, A)], A)
        callback.begin(parts[0][0])
        for epoch, rows in parts:
            if torch.equal(rows, batches[0]):
                callback.on_epoch_start(epoch)
            optimizer.zero_grad()
            model(X[rows], A[rows]).loss.backward()
            optimizer.step()

    steps = [(epoch, rows) for epoch in range(2) for rows in batches]
    models = [attach(Net(), crowdnal.DLEM(C, R)) for _ in range(3)]
    whole, first, second = ((m, torch.optim.Adam(m.parameters(), 0.05)) for m in models)
    run(*whole, steps)
    run(*first, steps[:6])
    second[0].load_state_dict(copy.deepcopy(first[0].state_dict()))
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    run(*second, steps[6:])
    for name, value in whole[0].state_dict().items():
        assert torch.equal(value, second[0].state_dict()[name]), name
