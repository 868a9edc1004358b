"""The ops on a GPU: what the tests of the CPU check, and streams, graphs, devices, and the sanitizers of CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import op_checks
import pytest
import test_joint_ops
import test_ops
import torch
from attached import ATTACHED, C, R, labels, mlp
from halves import READERS, halved
from hypothesis import given, settings
from op_checks import as_tuple, check_both_orders, leaf, to_float
from pairs import impossible, make_pairs, pairs
from problems import Problem, make_problem, problems
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import crowdnal
import crowdnal.functional as F
from crowdnal import reference
from crowdnal.annotations import Annotations
from crowdnal.attach import attach

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytestmark = pytest.mark.cuda
ops = torch.ops.crowdnal
DEVICE = "cuda"
KINDS = (reference.NONE, reference.SOFTMAX, reference.SOFTPLUS)
SOFTMAX = ["mix", "mix_items", "mix_annotators", "softmax_link", "softmax_link_backward"]
MIXTURE = ["mixture_link", "mixture_link_backward"]
JOINT = ["evidence", "counts", "joint_link", "joint_link_backward", "em_step"]
PAIRS = ["pair_confusion", "pair_confusion_backward"]
LISTS: dict[str, Callable[..., list[tuple[Any, ...]]]] = {
    **dict.fromkeys(SOFTMAX + MIXTURE, test_ops.arguments),
    **dict.fromkeys(JOINT, test_joint_ops.arguments),
    **dict.fromkeys(PAIRS, lambda p, name, kind=0: make_pairs(p, 2).arguments(name)),
}
# (B, R, C, K, annotations an item): every tier, long segments, many annotators
SIZES = [
    (0, 3, 2, 2, 1),
    (64, 9, 8, 8, 6),
    (3, 1, 5, 7, 4000),
    (200, 40, 18, 30, 5),
    (40, 5, 33, 130, 9),
    (500, 2000, 9, 10, 5),
]
fast = settings(max_examples=15, deadline=None)
each_op = pytest.mark.parametrize("name", LISTS)


def to_device(args: Any, device: str = DEVICE) -> Any:
    return tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)


def on_device(name: str) -> Callable[..., tuple[Tensor, ...]]:
    """The op on the device, for arguments and results on the CPU."""
    return lambda *args: to_device(as_tuple(getattr(ops, name)(*to_device(args))), "cpu")


def arguments(name: str, problem: Problem) -> list[tuple[Any, ...]]:
    kinds = KINDS if "mixture" in name or "joint" in name else (reference.SOFTMAX,)
    return [args for kind in kinds for args in LISTS[name](problem, name, kind)]


def test_cuda_is_native() -> None:
    assert crowdnal.backend()["cuda"] == "native"
    assert all(torch._C._dispatch_has_kernel_for_dispatch_key(f"crowdnal::{name}", "CUDA") for name in LISTS)


# Values


@each_op
@fast
@given(problem=problems(max_matrices=60_000))
def test_op_equals_reference(name: str, problem: Problem) -> None:
    for args in arguments(name, problem):
        op_checks.check_values(on_device(name), getattr(reference, name), args)
        op_checks.check_float_error(on_device(name), getattr(reference, name), args)


@pytest.mark.parametrize("name", PAIRS)
@fast
@given(case=pairs())
def test_pairs_of_every_scale_equal_reference(name: str, case: Any) -> None:
    for args in [*case.arguments(name), *impossible().arguments(name)]:
        op_checks.check_values(on_device(name), getattr(reference, name), args)


@pytest.mark.parametrize("per_item", [2, 40])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_stored_values_far_below_zero(kind: int, per_item: int) -> None:
    problem = make_problem(12, 4, 5, 20, per_item, seed=4)
    problem.confusion[0, :, 0] = -110.0
    problem.confusion[1, 2] -= 120.0
    problem.confusion[2] = 40 * problem.confusion[2] - 200.0
    problem.confusion[3] *= 30.0
    for name in [*MIXTURE, "joint_link", "joint_link_backward"]:
        for args in LISTS[name](problem, name, kind):
            truth = as_tuple(getattr(reference, name)(*args))
            for inputs, tolerance in ((args, 1e-9), (to_float(args), 2e-4)):
                for ours, wanted in zip(on_device(name)(*inputs), truth, strict=True):
                    torch.testing.assert_close(ours.double(), wanted, rtol=tolerance, atol=tolerance)


@each_op
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bitwise_equal_over_runs_streams_and_layouts(name: str, sizes: tuple[int, ...]) -> None:
    op = getattr(ops, name)
    for args in arguments(name, make_problem(*sizes, seed=3)):
        for dtyped in (to_device(args), to_device(to_float(args))):
            first = as_tuple(op(*dtyped))
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                others = [as_tuple(op(*dtyped)) for _ in range(3)]
            torch.cuda.current_stream().wait_stream(stream)
            strided = tuple(spread(a) for a in dtyped)
            for other in [*others, as_tuple(op(*strided))]:
                assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def spread(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor) or tensor.dim() == 0:
        return tensor
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


@pytest.mark.parametrize("where", ["one annotator", "one item"])
def test_long_segments_lose_no_accuracy(where: str) -> None:
    nnz, zeros = 200_000, torch.zeros(200_000, dtype=torch.long)
    every = torch.arange(nnz)
    if where == "one annotator":
        index, items, annotators = (torch.arange(nnz + 1), every, zeros, every), nnz, 1
    else:
        index, items, annotators = (torch.tensor([0, nnz]), zeros, every, every), 1, nnz
    grad, one = torch.rand(nnz, 3), torch.ones(1)
    if where == "one annotator":
        (out,) = on_device("mix_annotators")(one.expand(items, 1), grad, *index, annotators)
    else:
        (out,) = on_device("mix_items")(grad, torch.eye(3).expand(annotators, 3, 3), *index)
    torch.testing.assert_close(out.flatten()[:3].double(), grad.double().sum(0), rtol=3e-6, atol=0)


# What surrounds a kernel


@each_op
def test_a_cuda_graph_captures_the_op(name: str) -> None:
    op = getattr(ops, name)
    for args in arguments(name, make_problem(64, 9, 8, 8, 6, seed=3)):
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
            assert all(torch.equal(a, b) for a, b in zip(captured, as_tuple(op(*args)), strict=True))


def test_a_training_step_does_not_wait_for_the_device() -> None:
    p = make_problem(64, 9, 8, 8, 6, seed=3)
    annotations = p.annotations.prepare().to(DEVICE)
    scores, confusion = (leaf(t.float().to(DEVICE)) for t in (p.scores, p.confusion))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for loss in (F.crowd_cross_entropy, F.crowd_mixture_nll, F.crowd_marginal_nll):
            loss(scores.log_softmax(1), confusion, annotations).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_op
def test_opcheck(name: str) -> None:
    for args in arguments(name, make_problem(5, 4, 3, 3, 3, seed=1)):
        op_checks.check_opcheck(getattr(ops, name), to_device(args), differentiable=name != "em_step")


def test_arguments_on_another_device_are_refused() -> None:
    p = make_problem(6, 4, 3, 3, 4, seed=2)
    for position in range(6):
        args = list(to_device(test_ops.arguments(p, "mix")[0]))
        args[position] = args[position].cpu()
        if position != 1:  # the device of the confusion is the op's
            with pytest.raises(RuntimeError, match="is not on the device"):
                ops.mix(*args)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each_op
def test_the_second_device_is_used_whichever_is_current(name: str) -> None:
    for args in arguments(name, make_problem(64, 9, 8, 8, 6, seed=3)):
        here, there = (as_tuple(getattr(ops, name)(*to_device(args, f"cuda:{i}"))) for i in (0, 1))
        assert all(t.device.index == 1 for t in there)
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(here, there, strict=True))


def test_index_out_of_range_is_an_assertion_on_the_device() -> None:
    code = """
import torch, crowdnal
index = [torch.tensor(v, device="cuda") for v in ([0, 1], [0], [7], [0])]
torch.ops.crowdnal.mix(torch.ones(1, 2, device="cuda"), torch.ones(3, 2, 2, device="cuda"), *index)
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0 and "assert" in done.stderr


def test_more_elements_than_32_bits_count() -> None:
    sizes = 600_000, 60, 60  # 2.16e9 elements, 8.6 GB
    if torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip("needs 30 GB")
    confusion = torch.zeros(sizes, device=DEVICE)
    confusion[-1] = torch.eye(60)
    index = to_device(
        (torch.tensor([0, 1]), torch.zeros(1).long(), torch.tensor([sizes[0] - 1]), torch.zeros(1).long())
    )
    scores = torch.randn(1, 60, device=DEVICE)
    assert torch.equal(ops.mix(scores, confusion, *index), scores)
    grad = ops.mix_annotators(scores, scores, *index, sizes[0])
    torch.testing.assert_close(grad[-1], scores.T @ scores)
    assert not grad[:-1].any()


# Derivatives, transforms, models


def moved(p: Problem) -> tuple[Annotations, tuple[Tensor, ...]]:
    return p.annotations.to(DEVICE), to_device((p.scores, p.confusion, p.stored, p.weight))


def test_both_orders_of_derivatives() -> None:
    a, (scores, confusion, stored, weight) = moved(make_problem(4, 3, 3, 2, 3, seed=6))
    check_both_orders(lambda z, w: F.mix(z, w, a), (leaf(scores), leaf(confusion)))
    check_both_orders(
        lambda z, w, u: F.crowd_cross_entropy(z, w, a, weight=u), (leaf(scores), leaf(confusion), leaf(weight))
    )
    for function in (F.crowd_mixture_nll, F.crowd_marginal_nll):
        check_both_orders(
            lambda z, w, f=function: f(z.log_softmax(1), w, a, normalization="softplus"), (leaf(scores), leaf(stored))
        )
    case = make_pairs(make_problem(3, 2, 2, 3, 2, seed=6), 2)
    pair_inputs = tuple(leaf(t.to(DEVICE)) for t in (case.difficulty, case.competence))
    check_both_orders(partial(F.pair_confusion, annotations=case.annotations.to(DEVICE)), pair_inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_dtype_is_accumulated_in_single_precision_at_least(dtype: torch.dtype) -> None:
    a, (scores, confusion, _, _) = moved(make_problem(64, 9, 8, 8, 6, seed=3))
    inputs = [leaf(t.to(dtype)) for t in (scores, confusion)]
    loss = F.crowd_cross_entropy(*inputs, a)
    loss.backward()
    exact = [leaf(t.detach().double()) for t in inputs]
    wanted = F.crowd_cross_entropy(*exact, a)
    wanted.backward()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-6)
    for ours, truth in zip(inputs, exact, strict=True):
        assert ours.grad is not None and truth.grad is not None and ours.grad.dtype == dtype
        torch.testing.assert_close(ours.grad, truth.grad.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_sparse_gradients() -> None:
    a, (scores, confusion, _, _) = moved(make_problem(20, 50, 4, 4, 3, seed=2))
    grads = []
    for sparse in (True, False):
        w = leaf(confusion)
        F.crowd_cross_entropy(scores, w, a, sparse_grad=sparse).backward()
        assert w.grad is not None
        grads.append(w.grad.to_dense())
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("objective", ATTACHED)
def test_attached_models_train_as_on_the_cpu(objective: str) -> None:
    losses = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = attach(mlp(), ATTACHED[objective](C, R)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(1)).to(device)
        for seed in range(5):
            loss = model(x, labels(12, seed).to(device)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach().cpu())
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)


def test_compiled_step_equals_eager_and_is_compiled_once() -> None:
    torch._dynamo.reset()
    model = attach(mlp(), ATTACHED["crowd-layer"](C, R)).to(DEVICE)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda x, a: model(x, a).loss, fullgraph=True, backend=counter)
    for seed in range(3):
        x, annotations = torch.randn(5, 5, device=DEVICE), labels(5, seed).to(DEVICE)
        gradients = []
        for step in (lambda x, a: model(x, a).loss, compiled):
            model.zero_grad()
            step(x, annotations).backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


# The sanitizers


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(f"{home}/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, str(Path(__file__)), "once"]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def every_op_once() -> None:
    for sizes in ((6, 3, 3, 4, 4), (5, 2, 33, 40, 9), (2, 2, 130, 129, 9)):
        for name in LISTS:
            for args in arguments(name, make_problem(*sizes, seed=1)):
                getattr(ops, name)(*to_device(to_float(args)))
                if name in READERS:
                    getattr(ops, name)(*to_device(halved(name, args, torch.bfloat16)))
    torch.cuda.synchronize()


if __name__ == "__main__" and sys.argv[1:] == ["once"]:
    every_op_once()
