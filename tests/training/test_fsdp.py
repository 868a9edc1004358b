"""FSDP2 in the recipes that people have: gradients and predictions are those of whole parameters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.compare import assert_close
from torch import Tensor, nn

import crowdnal
from crowdnal import Annotations, CrowdModel, ObjectiveCallback
from crowdnal.data import CrowdDataset, collate
from crowdnal.functional import crowd_cross_entropy, crowd_mixture_nll, mix
from crowdnal.objectives import OBJECTIVES, create

timm = pytest.importorskip("timm")
gloo = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
pytestmark = gloo
N, C, R = 16, 3, 5
COMPARE_ITEMS = {"max-mig", "geocrowdnet"}


def root(model: CrowdModel) -> None:
    shard(model)


def backbone_and_root(model: CrowdModel) -> None:
    shard(model.backbone)
    shard(model)


def blocks_and_root(model: CrowdModel) -> None:
    for block in model.backbone.blocks:
        shard(block)
    shard(model)


def backbone_alone(model: CrowdModel) -> None:
    """The objective is whole on every process, its gradients are averaged by hand."""
    shard(model.backbone)


RECIPES: dict[str, Callable[[CrowdModel], None]] = {
    f.__name__: f for f in (root, backbone_and_root, blocks_and_root, backbone_alone)
}


def shard(module: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))


def attached(name: str) -> CrowdModel:
    torch.manual_seed(0)
    backbone = timm.create_model("test_vit", num_classes=C, img_size=32)
    return crowdnal.attach(backbone, create(name, num_classes=C, num_annotators=R))


def data() -> tuple[Tensor, Annotations]:
    generator = torch.Generator().manual_seed(1)
    annotations = Annotations.from_dense(torch.randint(-1, C, (N, R), generator=generator), num_classes=C)
    annotations.item_id = torch.arange(N)
    return torch.randn(N, 3, 32, 32, generator=generator), annotations


def check(name: str, recipe: str) -> None:
    x, a = data()
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, sharded = attached(name), attached(name)
    RECIPES[recipe](sharded)
    rows = torch.arange(rank, N, size)
    callback = ObjectiveCallback(sharded, [(x[rows], a[rows])], a)
    callback.on_epoch_start(0)
    ObjectiveCallback(whole, [(x, a)], a).on_epoch_start(0)
    share = crowdnal.batch_shares(sharded, [a[rows]])[0]
    (share * sharded(x[rows], a[rows]).loss).backward()
    whole(x, a).loss.backward()
    if recipe == "backbone_alone":
        for parameter in sharded.objective.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= size
    moved = 0.0
    for (key, mine), parameter in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found = torch.zeros_like(expected) if mine.grad is None else whole_of(mine.grad)
        assert_close(found, expected, atol=2e-6, where=f"{name}, {recipe}: {key}")
        moved += float(expected.abs().sum())
    assert moved > 0
    callback.on_epoch_start(1)
    logits, _ = callback.predict()
    assert_close(logits, whole.eval()(x), atol=1e-5, where=f"{name}, {recipe}")
    if whole.objective.models_annotators:
        assert sharded.objective.confusion().shape == (R, C, whole.objective.num_labels)


def whole_of(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["crowd-layer", "dl-em", "conal"])
def test_a_sharded_model_is_the_whole_one(alone: None, name: str, recipe: str) -> None:
    check(name, recipe)


@pytest.mark.usefixtures("alone")
def test_a_sharded_confusion_is_refused_by_name() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    x, a = torch.rand(N, C), data()[1]
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    confusion = distribute_tensor(torch.rand(R, C, C), mesh, [Shard(0)])
    for function in (crowd_cross_entropy, crowd_mixture_nll, mix):
        with pytest.raises(ValueError, match=r"confusion is a DTensor.* confusion\.full_tensor\(\) is; .* rank= or"):
            function(x, confusion, a)
    model = attached("trace")
    root(model)
    features = torch.randn(N, C)
    with pytest.raises(ValueError, match=r"DTensor.*model\.unshard\(\)"):
        model.objective.log_likelihood(features, a)
    model.unshard()
    assert model.objective.log_likelihood(features, a).shape == (a.num_annotations,)
    model.reshard()


@pytest.mark.usefixtures("alone")
def test_sparse_gradients_under_ddp_are_refused() -> None:
    objective = crowdnal.CrowdLayer(C, R, sparse_grad=True)
    model = nn.parallel.DistributedDataParallel(crowdnal.attach(nn.Linear(4, C), objective))
    with pytest.raises(RuntimeError, match="sparse_grad=True cannot be used under DistributedDataParallel.*rank="):
        model(torch.randn(N, 4), data()[1])


def worker(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    for name in OBJECTIVES:
        if name not in COMPARE_ITEMS:
            for recipe in RECIPES:
                check(name, recipe)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_with_every_objective(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path / "rendezvous")], env=environment)
        for rank in range(2)
    ]
    assert [rank.wait(timeout=600) for rank in ranks] == [0, 0]


def test_the_callback_takes_a_loader(alone: None) -> None:
    """The usual recipe: rounds of EM, whose predictions go through the root."""
    x, a = data()
    model = attached("dl-em")
    root(model)
    loader = torch.utils.data.DataLoader(CrowdDataset(x, a), 8, collate_fn=collate)
    callback = ObjectiveCallback(model, loader)
    callback.on_epoch_start(0)
    callback.on_epoch_start(1)
    assert len(callback.history) == 1 and torch.isfinite(model.objective.targets).all()


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2])
