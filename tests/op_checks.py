"""What every op family is checked for: values, float32 error, layouts, determinism, derivatives of both orders."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from crowdnal.ops import OPS

Arguments = tuple[Any, ...]
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


def check_values(op: Op, reference: Op, args: Arguments) -> None:
    for ours, wanted in zip(as_tuple(op(*args)), as_tuple(reference(*args)), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)


def check_float_error(op: Op, reference: Op, args: Arguments) -> None:
    """At most twice that of eager float32 plus 2e-6 of the largest value."""
    single = to_float(args)
    results = zip(*(as_tuple(out) for out in (op(*single), reference(*single), reference(*args))), strict=True)
    for ours, eager, truth in results:
        assert ours.dtype == torch.float32
        if truth.numel() > 0:
            allowed = (eager.double() - truth).abs().max() + 2e-6 * (1 + truth.abs().max())
            assert (ours.double() - truth).abs().max() <= 2 * allowed


def check_layouts(op: Op, args: Arguments) -> None:
    strided = as_tuple(op(*(non_contiguous(a) for a in args)))
    assert all(torch.equal(a, b) for a, b in zip(strided, as_tuple(op(*args)), strict=True))


def check_bitwise(op: Op, args: Arguments, threads: Iterable[int] = (1, 2, 2)) -> None:
    before, outs = torch.get_num_threads(), []
    try:
        for count in threads:
            torch.set_num_threads(count)
            outs.append(as_tuple(op(*args)))
    finally:
        torch.set_num_threads(before)
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))


def check_first_gradients(op: Op, reference: Op, args: Arguments) -> None:
    grads = []
    for function in (op, reference):
        inputs = leaves(args)
        total = sum(out.square().sum() + 1.3 * out.sum() for out in as_tuple(function(*inputs)))
        wanted = [a for a in inputs if isinstance(a, Tensor) and a.requires_grad]
        grads.append(torch.autograd.grad(total, wanted, allow_unused=True))
    for ours, theirs in zip(*grads, strict=True):
        theirs = torch.zeros_like(ours) if theirs is None else theirs
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def check_opcheck(op: Any, args: Arguments, differentiable: bool = True) -> None:
    given = leaves(args) if differentiable else args
    assert set(torch.library.opcheck(op.default, given).values()) == {"SUCCESS"}


def check_both_orders(function: Op, inputs: tuple[Tensor, ...]) -> None:
    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_batched_grad=True)
