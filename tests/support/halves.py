"""What ops with matrices in half precision are checked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from crowdnal import reference
from crowdnal.ops import OPS
from support.compare import assert_close, assert_same, assert_within
from support.op_checks import as_tuple, float_error
from support.problems import Problem, make_problem

DTYPES = (torch.float16, torch.bfloat16)

READERS = [name for name, op in OPS.items() if name != "select" and op.matrices]
"""The ops that read matrices, but for `select`, which copies them."""


def half_problem(sizes: tuple[int, ...], dtype: torch.dtype) -> Problem:
    """Of matrices whose values are numbers of `dtype`, so that what an op is given beside them belongs to them."""
    problem = make_problem(*sizes, seed=5)
    problem.confusion = problem.confusion.to(dtype).double()
    return problem


def halved(name: str, args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """The matrices in `dtype`, all else that is floating in float32."""
    op = OPS[name]
    named = op.arguments(*to(args, torch.float32))
    return tuple(named._replace(**{matrix: getattr(named, matrix).to(dtype) for matrix in op.matrices}))


def to(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def check_half(op: Callable[..., Any], name: str, args: tuple[Any, ...], dtype: torch.dtype, exact: bool) -> None:
    """Float32 results with the error of float32 on the same values; `exact`: the same bits as from float32 matrices."""
    args = halved(name, args, dtype)
    ours = as_tuple(op(*args))
    single, truth = (to(args, d) for d in (torch.float32, torch.float64))
    results = zip(*(as_tuple(getattr(reference, name)(*given)) for given in (args, single, truth)), strict=True)
    for n, (out, (stored, eager, wanted)) in enumerate(zip(ours, results, strict=True)):
        assert out.dtype == stored.dtype == torch.float32
        assert_same(stored, eager, f"output {n} of the reference")
        assert_within(out, wanted, float_error(eager, wanted), f"output {n}")
    if exact:
        assert_same(ours, as_tuple(op(*single)), "output")


def check_every_number(op: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """All numbers of 16 bits as the matrices [256, 1, 256] of an item each."""
    table = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).reshape(256, 1, 256)
    each = torch.arange(256)
    out = op(table, None, torch.arange(257), each, each, each, None, torch.zeros_like(each))
    assert_close(out, table.float().squeeze(1), rtol=0, atol=0, equal_nan=True)
