"""The public losses under torch.func and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import transform_checks
from support.compare import assert_close
from support.losses import losses
from support.op_checks import leaf
from support.problems import Problem, make_problem
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import crowdnal.functional as F


@pytest.fixture
def problem() -> Problem:
    return make_problem(5, 4, 4, 3, 3, seed=5)


# torch.func


@pytest.mark.parametrize("which", [0, 1])
def test_functorch_transforms_agree_with_autograd(problem: Problem, which: int) -> None:
    transform_checks.check_against_autograd(problem, which)


@pytest.mark.parametrize("which", [0, 1])
def test_transforms_leave_nothing_in_the_annotations(which: int) -> None:
    """What is computed once and kept must not be a tensor of a transform that has ended."""
    problem = make_problem(5, 4, 4, 3, 3, seed=5)
    loss = losses(problem, "none")[which]

    def total(z: Tensor) -> Tensor:
        return loss(z, problem.confusion).square().sum()

    first = torch.func.jacfwd(torch.func.jacrev(total))(problem.scores)
    assert_close(torch.func.jacrev(torch.func.jacfwd(total))(problem.scores), first)
    assert_close(torch.autograd.functional.hessian(total, problem.scores), first)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("in_dims", [(0, None), (None, 2), (1, 0)])
def test_vmap_equals_a_loop(problem: Problem, which: int, in_dims: tuple[int | None, int | None]) -> None:
    transform_checks.check_vmap(problem, which, in_dims)


def test_raw_ops_are_never_silent_in_forward_mode(problem: Problem) -> None:
    transform_checks.check_raw_ops_in_forward_mode(problem)


# torch.compile


def compiled_step(reduction: str) -> Callable[..., Tensor]:
    def step(features: Tensor, linear: Tensor, confusion: Tensor, stored: Tensor, annotations: Any) -> Tensor:
        logits = features @ linear
        first = F.crowd_cross_entropy(logits.softmax(1), confusion, annotations, reduction=reduction)  # type: ignore[arg-type]
        second = F.crowd_mixture_nll(
            logits.log_softmax(1),
            stored,
            annotations,
            normalization="softplus",
            reduction=reduction,  # type: ignore[arg-type]
        )
        return (first + second).square().sum()

    return step


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("reduction", "backend"),
    [("mean", "inductor"), ("none", "aot_eager"), ("item_mean", "aot_eager"), ("per_item", "aot_eager")],
)
def test_compiled_training_step_equals_eager_without_recompiles(reduction: str, backend: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    step = compiled_step(reduction)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for seed, per_item in enumerate([3, 5, 2, 4, 6]):  # ragged: another number of annotations each time
        p = make_problem(16, 7, 4, 3, per_item, seed=seed)
        features = torch.randn(16, 5, dtype=torch.double)
        parameters = [
            torch.randn(5, 4, dtype=torch.double, requires_grad=True), leaf(p.confusion), leaf(p.stored)
        ]  # fmt: skip
        values = [function(features, *parameters, p.annotations) for function in (compiled, step)]
        assert_close(*values)
        for ours, wanted in zip(*(torch.autograd.grad(v, parameters) for v in values), strict=True):
            assert_close(ours, wanted)
    assert counter.frame_count == 1
