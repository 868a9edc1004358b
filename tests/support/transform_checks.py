"""What torch.func must give of the losses, on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import crowdnal.functional as F
from support.compare import assert_close
from support.losses import losses
from support.problems import Problem


def check_against_autograd(problem: Problem, which: int) -> None:
    loss = losses(problem, "mean")[which]
    scores, confusion = problem.scores, problem.confusion
    wanted = torch.autograd.functional.hessian(lambda z: loss(z, confusion), scores)
    assert_close(torch.func.hessian(loss)(scores, confusion), wanted)
    assert_close(torch.func.jacrev(torch.func.jacfwd(loss))(scores, confusion), wanted)
    assert_close(torch.func.jacrev(torch.func.grad(loss))(scores, confusion), wanted)
    wanted = torch.autograd.functional.hessian(lambda w: loss(scores, w), confusion)
    assert_close(torch.func.hessian(loss, argnums=1)(scores, confusion), wanted)
    with pytest.raises(RuntimeError, match="forward mode inside forward mode"):
        torch.func.jacfwd(torch.func.jacfwd(loss))(scores, confusion)


def check_vmap(problem: Problem, which: int, in_dims: tuple[int | None, int | None]) -> None:
    loss = losses(problem, "none")[which]
    generator = torch.Generator().manual_seed(0)
    inputs = [
        base
        if dim is None
        else torch.stack([base + torch.randn(base.shape, generator=generator).to(base) for _ in range(3)], dim)
        for base, dim in zip((problem.scores, problem.confusion), in_dims, strict=True)
    ]

    def each(function: Callable[..., Any]) -> list[Any]:
        return [
            function(*(t if d is None else t.select(d, v) for t, d in zip(inputs, in_dims, strict=True)))
            for v in range(3)
        ]

    assert_close(torch.vmap(loss, in_dims)(*inputs), torch.stack(each(loss)))
    grad = torch.func.grad(lambda z, w: loss(z, w).square().sum(), argnums=(0, 1))
    for ours, *wanted in zip(torch.vmap(grad, in_dims)(*inputs), *each(grad), strict=True):
        assert_close(ours, torch.stack(wanted))


def check_raw_ops_in_forward_mode(problem: Problem) -> None:
    p = problem
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(p.scores, torch.ones_like(p.scores))
        out = torch.autograd.forward_ad.unpack_dual(torch.ops.crowdnal.mix(dual, p.confusion, *p.index))
    assert_close(out.tangent, F.mix(torch.ones_like(p.scores), p.confusion, p.annotations))
