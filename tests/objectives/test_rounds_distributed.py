"""Two processes: rounds from predictions that each makes a part of, and running counts summed over both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.attached import C, R, labels, mlp
from support.compare import assert_close
from torch import nn

import crowdnal
from crowdnal import DLEM, ObjectiveCallback

N = 12


def images() -> torch.Tensor:
    return torch.randn(N, 5, generator=torch.Generator().manual_seed(1))


def worker(rank: int, rendezvous: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    a, x, results = labels(N), images(), []
    for incremental in (False, True):
        model = nn.parallel.DistributedDataParallel(crowdnal.attach(mlp(), DLEM(C, R, incremental=incremental)))
        rows = torch.arange(rank, N + 1, 2) % N  # a sampler pads with items that others have too
        callback = ObjectiveCallback(model, [(x[part], a[part]) for part in rows.split(3)], a)
        for epoch in range(2):
            callback.on_epoch_start(epoch)
            model(x[rows[:6]], a[rows[:6]]).loss.backward()
            callback.on_epoch_end(epoch)
        objective = model.module.objective
        results.append([objective.targets, objective.confusion(), *(p.grad for p in model.parameters())])
    torch.save(results, f"{out}.{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_two_processes_make_the_rounds_of_one(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    arguments = [sys.executable, __file__]
    ranks = [
        subprocess.Popen([*arguments, str(rank), str(tmp_path / "rendezvous"), str(tmp_path / "out")], env=environment)
        for rank in range(2)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    both = [torch.load(tmp_path / f"out.{rank}") for rank in range(2)]
    a, x = labels(N), images()
    for incremental in (False, True):
        for one, other in zip(both[0][incremental], both[1][incremental], strict=True):
            assert torch.equal(one, other)
        targets, confusion, *gradients = both[0][incremental]
        model = crowdnal.attach(mlp(), DLEM(C, R, incremental=incremental, reduction="sum"))
        callback = ObjectiveCallback(model, [(x, a)], a)
        halves = [torch.arange(rank, N, 2) for rank in range(2)]
        counted = [int((a[rows].counts > 0).sum()) for rows in halves]
        for epoch in range(2):
            callback.on_epoch_start(epoch)
            if incremental:
                model(x, a).loss  # noqa: B018
            else:
                # the mean of the processes' means over their items
                losses = [model(x[rows], a[rows]).loss / n for rows, n in zip(halves, counted, strict=True)]
                (sum(losses) / 2).backward()
        assert_close(model.objective.targets, targets)
        assert_close(model.objective.confusion(), confusion)
        if not incremental:
            assert_close([p.grad for p in model.parameters()], gradients)


if __name__ == "__main__":
    worker(int(sys.argv[1]), *sys.argv[2:4])
