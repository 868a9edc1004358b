"""Attached models under torch.func, torch.compile, DistributedDataParallel and FSDP."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from support.attached import ATTACHED, C, R, check_compiled, check_functional_call, labels, mlp
from support.compare import assert_close
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard

from crowdnal.data import Annotations
from crowdnal.training import attach


@pytest.mark.parametrize("objective", ATTACHED)
def test_functional_call_and_func_grad(objective):
    check_functional_call(attach(mlp(), ATTACHED[objective](C, R)))


# torch.compile


@pytest.mark.quick(1)
@pytest.mark.parametrize("objective", ATTACHED)
def test_compiled_step_equals_eager_and_is_compiled_once(objective):
    check_compiled(attach(mlp(), ATTACHED[objective](C, R)))


def compilations(backbone: nn.Module, *shape: int, objective: str = "crowd-layer") -> tuple[int, int]:
    """Of a training with a smaller last batch, then of evaluation."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, eager = attach(backbone, ATTACHED[objective](C, R)), attach(backbone, ATTACHED[objective](C, R))
    model.compile(fullgraph=True, backend=counter)
    for seed, items in enumerate((8, 8, 5, 8, 3)):
        x = torch.randn(items, *shape)
        loss = model(x, labels(items, seed)).loss
        loss.backward()
        assert_close(loss, eager(x, labels(items, seed)).loss, rtol=1e-4, atol=1e-5)
    trained = counter.frame_count
    model.eval()
    with torch.no_grad():
        for items in (8, 3, 8):
            x = torch.randn(items, *shape)
            assert_close(model(x), backbone(x), rtol=1e-4, atol=1e-5)
    return trained, counter.frame_count - trained


def test_one_compilation_for_training_and_one_for_evaluation():
    assert compilations(mlp(), 5) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("test_resnet", 32), ("test_vit", 160)])
def test_one_compilation_for_a_cnn_and_a_transformer(name, size):
    timm = pytest.importorskip("timm")
    assert compilations(timm.create_model(name, num_classes=C), 3, size, size) == (1, 1)


# Two processes: DistributedDataParallel, and FSDP against it


def shard(rank: int) -> tuple[Tensor, Annotations]:
    """Annotators 0-2 are seen on rank 0 only, 3-4 on rank 1 only, 5 nowhere."""
    generator = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(6, 5, generator=generator)
    dense = torch.full((6, R), -1)
    columns = [0, 1, 2] if rank == 0 else [3, 4]
    dense[:, columns] = torch.randint(0, C, (6, len(columns)), generator=generator)
    return x, Annotations.from_dense(dense, num_classes=C)


def worker(rank: int, rendezvous: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    results = {}
    for name, make in ATTACHED.items():
        model = nn.parallel.DistributedDataParallel(attach(mlp(), make(C, R, reduction="sum")))
        if name == "trace":
            model.module.objective.trace_weight = 0.0  # per process, over the annotators of its own batch
        model(*shard(rank)).loss.backward()
        results[name] = {key: p.grad for key, p in model.module.named_parameters()}

        sharded = attach(mlp(), make(C, R, reduction="sum"))
        if name == "trace":
            sharded.objective.trace_weight = 0.0
        fully_shard(sharded, mesh=mesh)
        sharded(*shard(rank)).loss.backward()
        for key, p in sharded.named_parameters():
            assert_close(p.grad.full_tensor(), results[name][key])
        if sharded.objective.models_annotators:
            assert torch.equal(sharded.objective.confusion(), model.module.objective.confusion())
    if rank == 0:
        torch.save(results, out)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_ddp_and_fsdp_with_annotators_unseen_on_a_rank(tmp_path):
    out = tmp_path / "gradients.pt"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path / "rendezvous"), str(out)], env=environment)
        for rank in range(2)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    results = torch.load(out)
    shards = [shard(0), shard(1)]
    x = torch.cat([shards[0][0], shards[1][0]])
    dense = torch.cat([shards[0][1].to_dense(), shards[1][1].to_dense()])
    for name, make in ATTACHED.items():
        model = attach(mlp(), make(C, R, reduction="sum"))
        if name == "trace":
            model.objective.trace_weight = 0.0
        model(x, Annotations.from_dense(dense, num_classes=C)).loss.backward()
        for key, parameter in model.named_parameters():
            assert_close(2 * results[name][key], parameter.grad, where=key)


if __name__ == "__main__":
    worker(int(sys.argv[1]), *sys.argv[2:4])
