"""What surrounds the ops on a GPU: graphs, waiting, devices, large sizes, and the sanitizers of CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.attached import ATTACHED, C, R, labels, mlp
from support.compare import assert_close, assert_same
from support.cuda import DEVICE, each_op, ops, to_device
from support.halves import READERS, halved
from support.op_arguments import ALL, arguments, of_every_kind
from support.op_checks import as_tuple, leaf, to_float
from support.problems import make_problem
from torch import Tensor

import crowdnal
import crowdnal.functional as F
from crowdnal.data import Annotations
from crowdnal.training import attach

pytestmark = pytest.mark.cuda


def environment() -> dict[str, str]:
    """For another Python that is to import what this one did, wherever it starts."""
    folders = [str(Path(crowdnal.__file__).parents[1]), str(Path(__file__).parents[1]), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


@each_op
@pytest.mark.parametrize("sizes", [(64, 9, 8, 8, 6), (9, 3, 5, 7, 4000)], ids=str)
def test_a_cuda_graph_captures_the_op(name: str, sizes: tuple[int, ...]) -> None:
    op = getattr(ops, name)
    for args in of_every_kind(make_problem(*sizes, seed=3), name):
        args = to_device(to_float(args))
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            op(*args)
        torch.cuda.current_stream().wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = as_tuple(op(*args))
        values = next(a for a in args if isinstance(a, Tensor) and a.is_floating_point() and a.numel() > 1)
        for factor in (0.5, 1.5):  # other values in the same memory
            values.mul_(factor)
            graph.replay()
            assert_same(captured, as_tuple(op(*args)), "output")


@pytest.mark.parametrize("objective", ATTACHED)
def test_a_cuda_graph_captures_a_training_step(objective: str) -> None:
    """Annotations as they came, which the step sorts, forward, backward, optimizer."""
    model = attach(mlp(), ATTACHED[objective](C, R)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    a, x = labels(12), torch.randn(12, 5, device=DEVICE)
    raw = Annotations(a.indptr, a.annotator, a.label, num_annotators=R, num_classes=C).to(DEVICE)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x, raw.to(DEVICE)).loss.backward()  # a copy without what is cached
        optimizer.step()

    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    after = []
    x.mul_(0.5)  # other values in the same memory
    for run in (graph.replay, step):
        model.load_state_dict(start)
        run()
        after.append({name: value.clone() for name, value in model.state_dict().items()})
    assert any(not torch.equal(value, start[name]) for name, value in after[0].items())
    assert_close(*after, rtol=1e-5, atol=1e-6)


def test_a_training_step_does_not_wait_for_the_device() -> None:
    p = make_problem(64, 9, 8, 8, 6, seed=3)
    raw, prepared = p.annotations.to(DEVICE), p.annotations.prepare().to(DEVICE)
    scores, confusion = (leaf(t.float().to(DEVICE)) for t in (p.scores, p.confusion))
    optimizer = torch.optim.SGD([scores, confusion], lr=0.1, momentum=0.9)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for annotations in (raw, prepared):
            for loss in (F.crowd_cross_entropy, F.crowd_mixture_nll, F.crowd_marginal_nll):
                loss(scores.log_softmax(1), confusion, annotations).backward()
                optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_arguments_on_another_device_are_refused() -> None:
    p = make_problem(6, 4, 3, 3, 4, seed=2)
    for position in range(6):
        args = list(to_device(arguments(p, "mix")[0]))
        args[position] = args[position].cpu()
        with pytest.raises(RuntimeError, match="not on the device of the other arguments"):
            ops.mix(*args)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each_op
def test_the_second_device_is_used_whichever_is_current(name: str) -> None:
    for args in of_every_kind(make_problem(64, 9, 8, 8, 6, seed=3), name):
        here, there = (as_tuple(getattr(ops, name)(*to_device(args, f"cuda:{i}"))) for i in (0, 1))
        assert all(t.device.index == 1 for t in there) and torch.cuda.current_device() == 0
        assert_same(to_device(there, "cpu"), to_device(here, "cpu"), "output")


def test_index_out_of_range_is_an_assertion_on_the_device() -> None:
    code = """
import torch, crowdnal
index = [torch.tensor(v, device="cuda") for v in ([0, 1], [0], [7], [0])] + [None]
torch.ops.crowdnal.mix(torch.ones(1, 2, device="cuda"), torch.ones(3, 2, 2, device="cuda"), *index)
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode != 0 and "assert" in done.stderr and "ModuleNotFoundError" not in done.stderr


def test_no_memory_is_torchs_own_error_and_leaves_the_device_usable() -> None:
    index = to_device(make_problem(4, 2, 3, 3, 2, seed=1).index)
    rows, grad = torch.ones(4, 3, device=DEVICE), torch.ones(len(index[1]), 3, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory. crowdnal: tried to allocate"):
        ops.mix_annotators(rows, grad, *index, 2**40)
    assert float(ops.mix_annotators(rows, grad, *index, 2).sum()) == 9 * len(grad)


def test_second_derivatives_of_pairs_are_the_same_bits_every_time() -> None:
    items, annotators, per_item = 50, 4, 40  # many annotations to a row
    a = Annotations.from_dense(torch.randint(3, (items, per_item))).regroup(
        torch.arange(per_item) % annotators, annotators
    )
    a = a.to(DEVICE)
    leaves = [leaf(torch.randn(n, 3, 3, 2, device=DEVICE)) for n in (items, annotators)]

    def second() -> tuple[Tensor, ...]:
        first = torch.autograd.grad(F.pair_confusion(*leaves, a).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    wanted = second()
    for _ in range(20):
        assert_same(second(), wanted, "second derivative")


def test_more_elements_than_32_bits_count() -> None:
    sizes = 600_000, 60, 60  # 2.16e9 elements, 8.6 GB
    if torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip("needs 30 GB")
    confusion = torch.zeros(sizes, device=DEVICE)
    confusion[-1] = torch.eye(60)
    index = to_device(
        (torch.tensor([0, 1]), torch.zeros(1).long(), torch.tensor([sizes[0] - 1]), torch.zeros(1).long(), None)
    )
    scores = torch.randn(1, 60, device=DEVICE)
    assert torch.equal(ops.mix(scores, confusion, *index), scores)
    grad = ops.mix_annotators(scores, scores, *index, sizes[0])
    assert_close(grad[-1], scores.T @ scores)
    assert not grad[:-1].any()


# The sanitizers


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(f"{home}/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    # Errors of the API that torch tries and takes no notice of are not ours: an error of ours is an exception.
    options = ["--error-exitcode", "9", *(["--report-api-errors", "no"] if tool == "memcheck" else [])]
    command = [sanitizer, "--tool", tool, *options, sys.executable, str(Path(__file__)), "once"]
    env = environment() | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=400)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def every_op_once() -> None:
    for sizes in ((6, 3, 3, 4, 4), (5, 2, 33, 40, 9), (2, 2, 130, 129, 9)):
        for name in ALL:
            for args in of_every_kind(make_problem(*sizes, seed=1), name):
                getattr(ops, name)(*to_device(to_float(args)))
                if name in READERS:
                    getattr(ops, name)(*to_device(halved(name, args, torch.bfloat16)))
    torch.cuda.synchronize()


if __name__ == "__main__" and sys.argv[1:] == ["once"]:
    every_op_once()
