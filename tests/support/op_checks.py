"""What every op is checked for: values, float32 error, layouts, determinism, derivatives of both orders."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import crowdnal
from crowdnal import reference
from crowdnal.ops import OPS
from support.compare import assert_close, assert_same, assert_within
from support.op_arguments import Arguments, arguments
from support.pairs import make_pairs
from support.problems import Problem, make_problem

native = pytest.mark.skipif(crowdnal.backend()["cpu"] != "native", reason="a promise of the native kernels alone")
fast = settings(max_examples=15, deadline=None)
Op = Callable[..., Any]


def as_tuple(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def leaves(args: Arguments) -> Arguments:
    return tuple(leaf(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def to_float(args: Arguments) -> Arguments:
    return tuple(a.float() if isinstance(a, Tensor) and a.dtype == torch.double else a for a in args)


def non_contiguous(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor) or tensor.dim() == 0:
        return tensor
    out = torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2]
    return out.copy_(tensor)


def changed(name: str, args: Arguments, **changes: Callable[[Any], Any]) -> Arguments:
    """The arguments of an op with those named replaced by what is made of them."""
    named = OPS[name].arguments(*args)
    return tuple(named._replace(**{argument: change(getattr(named, argument)) for argument, change in changes.items()}))


def check_values(op: Op, plain: Op, args: Arguments) -> None:
    assert_close(as_tuple(op(*args)), as_tuple(plain(*args)), rtol=1e-9, atol=1e-9, where="output")


def check_float_error(op: Op, plain: Op, args: Arguments) -> None:
    """At most twice that of eager float32 plus 2e-6 of the largest value."""
    single = to_float(args)
    results = zip(*(as_tuple(out) for out in (op(*single), plain(*single), plain(*args))), strict=True)
    for n, (ours, eager, truth) in enumerate(results):
        assert ours.dtype == torch.float32
        assert_within(ours, truth, float_error(eager, truth), f"output {n}")


def float_error(eager: Tensor, truth: Tensor) -> float:
    """What float32 may be off by, where eager float32 gives `eager`."""
    if truth.numel() == 0:
        return 0.0
    return 2 * float((eager.double() - truth).abs().max() + 2e-6 * (1 + truth.abs().max()))


def check_single(op: Op, plain: Op, args: Arguments, tolerance: float) -> None:
    """In float32, against the reference in float64."""
    ours, wanted = as_tuple(op(*to_float(args))), as_tuple(plain(*args))
    assert_close([out.double() for out in ours], list(wanted), rtol=tolerance, atol=tolerance, where="output")


def check_far_below_zero(op: Op, name: str, kind: int, problem: Problem) -> None:
    for args in arguments(problem, name, kind):
        check_values(op, getattr(reference, name), args)
        check_single(op, getattr(reference, name), args, 2e-4)


def check_huge_values(op: Op, name: str, latents: int = 3) -> None:
    """Of `op`, which computes in float32 what the op of pairs of that name does."""
    case = make_pairs(make_problem(12, 5, 7, 6, 4, seed=9), latents)
    case.difficulty.sign_().mul_(200)  # integers: exact in float32
    case.competence.mul_(100).round_()
    for args in case.arguments(name):
        check_single(op, getattr(reference, name), args, 1e-5)
        assert all(out.isfinite().all() for out in op(*to_float(args)))


def at_odd_address(tensor: Any, shift: int = 1) -> Any:
    """The same numbers, contiguous, `shift` of them behind where torch begins a tensor."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dim() == 0:
        return tensor
    memory = tensor.new_zeros(tensor.numel() + shift)
    return memory[shift:].view(tensor.shape).copy_(tensor)


def check_layouts(op: Op, args: Arguments) -> None:
    assert_same(as_tuple(op(*(non_contiguous(a) for a in args))), as_tuple(op(*args)), "output")


def check_bitwise(op: Op, args: Arguments, threads: Iterable[int] = (1, 2, 2)) -> None:
    before, outs = torch.get_num_threads(), []
    try:
        for count in threads:
            torch.set_num_threads(count)
            outs.append(as_tuple(op(*args)))
    finally:
        torch.set_num_threads(before)
    for other in outs[1:]:
        assert_same(other, outs[0], "output")


def check_first_gradients(op: Op, plain: Op, args: Arguments) -> None:
    grads = []
    for function in (op, plain):
        inputs = leaves(args)
        total = sum(out.square().sum() + 1.3 * out.sum() for out in as_tuple(function(*inputs)))
        wanted = [a for a in inputs if isinstance(a, Tensor) and a.requires_grad]
        grads.append(torch.autograd.grad(total, wanted, allow_unused=True))
    wanted = [torch.zeros_like(a) if b is None else b for a, b in zip(*grads, strict=True)]
    assert_close(list(grads[0]), wanted, rtol=1e-8, atol=1e-8, where="gradient")


def check_opcheck(op: Any, args: Arguments, differentiable: bool = True) -> None:
    given = leaves(args) if differentiable else args
    assert set(torch.library.opcheck(op.default, given).values()) == {"SUCCESS"}


def check_both_orders(function: Op, inputs: tuple[Tensor, ...]) -> None:
    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_batched_grad=True)
