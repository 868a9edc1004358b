"""Losses of the parts of a step, weighted so that their gradients are those of the joined batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.compare import assert_close
from support.objectives import CASES, features_of
from support.small_crowd import C, R, logits_of

from crowdnal.data import Annotations
from crowdnal.objectives import CrowdLayer, Objective
from crowdnal.training import batch_shares

N = 9
PARTS = [torch.tensor(rows) for rows in ([0, 4, 5], [1], [2, 3, 6, 7, 8])]
COMPARES_ITEMS = {"max-mig", "max-mig prior", "geocrowdnet", "geocrowdnet rank", "dl-em incremental"}
EXACT = [name for name in CASES if name not in COMPARES_ITEMS and "batch" not in name and "sparse" not in name]


def crowd(weighted: bool = False) -> Annotations:
    """Annotator 3 is only in the second part, items have 0 to 4 labels."""
    generator = torch.Generator().manual_seed(5)
    dense = torch.randint(-1, C, (N, R), generator=generator)
    dense[:, 3] = -1
    dense[1] = torch.tensor([0, 1, 2, 0])
    dense[2] = -1
    a = Annotations.from_dense(dense, num_classes=C)
    a.item_id = torch.arange(N)
    if weighted:
        a.weight = torch.rand(a.num_annotations, generator=generator)
    return a


def gradients(objective: Objective, a: Annotations, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of logits and parameters, of the parts' losses times their shares."""
    objective.zero_grad()
    logits, features = logits_of(N).requires_grad_(), features_of(N)
    shares = batch_shares(objective, [a[rows] for rows in parts])
    for rows, share in zip(parts, shares, strict=True):
        (share * objective(logits[rows], a[rows], features[rows])).backward()
    found = [logits.grad, *(p.grad for p in objective.parameters() if p.requires_grad)]
    return [torch.zeros(0) if grad is None else grad.clone() for grad in found]


@pytest.mark.parametrize("name", EXACT)
def test_parts_of_a_step_have_the_gradient_of_the_whole(name: str) -> None:
    for weighted in (False, True):
        a = crowd(weighted)
        objective = CASES[name].begun(a)
        whole, parts = (gradients(objective, a, split) for split in ([torch.arange(N)], PARTS))
        assert any(float(grad.abs().sum()) > 0 for grad in whole)
        assert_close(parts, whole, rtol=1e-6, atol=1e-7)


def test_shares_of_nothing_and_of_sums() -> None:
    a = crowd()
    assert batch_shares(CrowdLayer(C, R), [a[[2]], a[[2]]]).tolist() == [0.0, 0.0]
    assert batch_shares(CrowdLayer(C, R, reduction="sum"), [a[[0]], a[[1]]]).tolist() == [1.0, 1.0]
    assert batch_shares(CrowdLayer(C, R), [a[[1]], a[[2]]]).tolist() == [1.0, 0.0]
    assert batch_shares(CrowdLayer(C, R, reduction="item_mean"), [a[[0, 1, 2]], a[[3]]]).tolist() == pytest.approx(
        [2 / 3, 1 / 3]
    )
    of_items = CrowdLayer(C, R, reduction="per_item")
    assert batch_shares(of_items, [a[[0, 1, 2]], a[[3]]]).tolist() == pytest.approx([2 / 3, 1 / 3])


def worker(rank: int, rendezvous: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    results = {}
    a = crowd()
    for name in EXACT:
        found = gradients(CASES[name].begun(a), a, [PARTS[:1], PARTS[1:]][rank])
        for grad in found:
            dist.all_reduce(grad)
        results[name] = [grad / 2 for grad in found]  # as DistributedDataParallel averages
    if rank == 0:
        torch.save(results, out)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_two_processes_have_the_gradient_of_one(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    out = tmp_path / "out"
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path / "rendezvous"), str(out)], env=environment)
        for rank in range(2)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    results, a = torch.load(out), crowd()
    for name in EXACT:
        expected = gradients(CASES[name].begun(a), a, [torch.arange(N)])
        assert_close(results[name], expected, rtol=1e-6, atol=1e-7, where=name)


if __name__ == "__main__":
    worker(int(sys.argv[1]), *sys.argv[2:4])
