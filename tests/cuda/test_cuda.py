"""The ops on a GPU: what the tests of the CPU check. What surrounds the kernels: test_cuda_runtime.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from support import op_checks
from support.attached import ATTACHED, C, R, check_compiled, labels, mlp
from support.compare import assert_close, assert_same
from support.cuda import DEVICE, SIZES, each_op, on_device, ops, spread, to_device
from support.long_segments import OUTPUTS, WHERE, check_long_segments
from support.op_arguments import ALL, MIXTURE, NORMALIZATIONS, PAIRS, far_below_zero, of_every_kind
from support.op_checks import as_tuple, check_both_orders, fast, leaf, to_float
from support.pairs import impossible, make_pairs, pairs
from support.problems import Problem, make_problem, problems
from torch import Tensor

import crowdnal
import crowdnal.functional as F
from crowdnal import reference
from crowdnal.data import Annotations
from crowdnal.ops import OPS
from crowdnal.training import attach

pytestmark = pytest.mark.cuda


def test_cuda_is_native() -> None:
    assert crowdnal.backend()["cuda"] == "native"
    assert all(torch._C._dispatch_has_kernel_for_dispatch_key(f"crowdnal::{name}", "CUDA") for name in ALL)


# Values


@each_op
@fast
@given(problem=problems(max_matrices=60_000))
def test_op_equals_reference(name: str, problem: Problem) -> None:
    for args in of_every_kind(problem, name):
        op_checks.check_values(on_device(name), getattr(reference, name), args)
        op_checks.check_float_error(on_device(name), getattr(reference, name), args)


@pytest.mark.parametrize("name", PAIRS)
@fast
@given(case=pairs())
def test_pairs_of_every_scale_equal_reference(name: str, case: Any) -> None:
    for args in [*case.arguments(name), *impossible().arguments(name)]:
        op_checks.check_values(on_device(name), getattr(reference, name), args)


@pytest.mark.parametrize("per_item", [2, 40])
@pytest.mark.parametrize("kind", NORMALIZATIONS[1:])
def test_stored_values_far_below_zero(kind: int, per_item: int) -> None:
    for name in [*MIXTURE, "joint_link", "joint_link_backward"]:
        op_checks.check_far_below_zero(on_device(name), name, kind, far_below_zero(20, per_item))


@each_op
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bitwise_equal_over_runs_streams_and_layouts(name: str, sizes: tuple[int, ...]) -> None:
    op = getattr(ops, name)
    for args in of_every_kind(make_problem(*sizes, seed=3), name):
        for dtyped in (to_device(args), to_device(to_float(args))):
            first = as_tuple(op(*dtyped))
            if "plan" in OPS[name].arguments._fields:
                without = op_checks.changed(name, dtyped, plan=lambda _: None)
                assert_same(as_tuple(op(*without)), first, "output without a plan")
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                others = [as_tuple(op(*dtyped)) for _ in range(3)]
            torch.cuda.current_stream().wait_stream(stream)
            strided = tuple(spread(a) for a in dtyped)
            shifted = tuple(op_checks.at_odd_address(a) for a in dtyped)
            for other in [*others, as_tuple(op(*strided)), as_tuple(op(*shifted))]:
                assert_same(other, first, "output")


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", OUTPUTS)
def test_long_segments_lose_no_accuracy(name: str, where: str) -> None:
    check_long_segments(on_device(name), name, where)


@each_op
def test_opcheck(name: str) -> None:
    for args in of_every_kind(make_problem(5, 4, 3, 3, 3, seed=1), name):
        op_checks.check_opcheck(getattr(ops, name), to_device(args), differentiable=name != "em_step")


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
    assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-6)
    for ours, truth in zip(inputs, exact, strict=True):
        assert ours.grad is not None and truth.grad is not None and ours.grad.dtype == dtype
        assert_close(ours.grad, truth.grad.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_sparse_gradients() -> None:
    a, (scores, confusion, _, _) = moved(make_problem(20, 50, 4, 4, 3, seed=2))
    grads = []
    for sparse in (True, False):
        w = leaf(confusion)
        F.crowd_cross_entropy(scores, w, a, sparse_grad=sparse).backward()
        assert w.grad is not None
        grads.append(w.grad.to_dense())
    assert_close(*grads)


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
    assert_close(*losses, rtol=1e-4, atol=1e-5)


def test_compiled_step_equals_eager_and_is_compiled_once() -> None:
    pytest.importorskip("triton")
    model = attach(mlp(), ATTACHED["crowd-layer"](C, R)).to(DEVICE)
    check_compiled(model, backend="inductor", device=DEVICE, rtol=1e-4, atol=1e-5)
