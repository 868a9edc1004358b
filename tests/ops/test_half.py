"""Matrices in float16 and bfloat16: read as they are stored, computed and differentiated in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support import op_checks
from support.compare import assert_close, assert_same
from support.halves import DTYPES, READERS, check_every_number, check_half, half_problem, halved, to
from support.op_arguments import arguments
from support.op_checks import leaf, native
from support.pairs import make_pairs
from support.problems import Problem, make_problem
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import crowdnal.functional as F
from crowdnal import reference

ops = torch.ops.crowdnal
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
Loss = Callable[..., Tensor]


def make(seed: int = 3, num_annotators: int = 5) -> Problem:
    return make_problem(8, num_annotators, 4, 3, 4, seed=seed)


def matrices(p: Problem, name: str, dtype: torch.dtype) -> Tensor:
    """What the loss of this name takes, [R, ., .]."""
    confusion = (
        p.stored if name.split()[0] in ("mixture", "marginal", "posterior", "label_log_likelihood") else p.confusion
    )
    return confusion.to(dtype)


def losses(p: Problem, dtype: torch.dtype, **options: Any) -> dict[str, Loss]:
    """Every loss and primitive that takes matrices, as functions of float32 rows [B, C] and of matrices."""
    a, shared, mixing, weight = p.annotations, p.shared.float(), p.mixing.float(), p.weight.float()
    grad = p.grad(3).float()

    def pair(z: Tensor, w: Tensor) -> Tensor:
        difficulty = (z[:, :, None, None] * torch.arange(3)[:, None]).to(dtype).to(w.dtype)
        return F.pair_confusion(difficulty, w.unsqueeze(3), a)

    out: dict[str, Loss] = {
        "softmax": lambda z, w: F.crowd_cross_entropy(z, w, a, **options),
        "mixed": lambda z, w: F.crowd_cross_entropy(z, w, a, shared=shared, mixing=mixing, weight=weight, **options),
    }
    for kind in ("softmax", "softplus", "none"):
        out[f"mixture {kind}"] = lambda z, w, k=kind: F.crowd_mixture_nll(
            z.log_softmax(1), w, a, normalization=k, weight=weight, **options
        )
    if options:
        return out
    for kind in ("softmax", "softplus", "none"):
        out[f"marginal {kind}"] = lambda z, w, k=kind: F.crowd_marginal_nll(
            z.log_softmax(1), w, a, normalization=k, weight=weight
        )
        out[f"posterior {kind}"] = lambda z, w, k=kind: F.crowd_posterior(z.log_softmax(1), w, a, normalization=k)
    return out | {
        "mix": lambda z, w: F.mix(z, w, a),
        "mix_items": lambda z, w: F.mix_items(grad, w, a) * z,
        "label_log_likelihood": lambda z, w: F.label_log_likelihood(w, a, weight=weight) * z,
        "pairs": pair,
    }


NAMES = list(losses(make(), torch.float16))
each_loss = pytest.mark.parametrize("name", NAMES)


def gradients(loss: Loss, scores: Tensor, confusion: Tensor, order: int) -> list[Tensor]:
    """The value, the gradients, and at order 2 those of a function of the gradients."""
    leaves = [leaf(scores), leaf(confusion)]
    value = loss(*leaves)
    grads = torch.autograd.grad(value.square().sum(), leaves, create_graph=order == 2, allow_unused=True)
    if order == 2:
        total = sum(g.float().square().sum() for g in grads if g is not None)
        assert isinstance(total, Tensor)
        grads += torch.autograd.grad(total, leaves, allow_unused=True)
    return [value.detach(), *(g for g in grads if g is not None)]


# The ops


@dtypes
@pytest.mark.parametrize("name", READERS)
def test_ops_compute_in_single(name: str, dtype: torch.dtype) -> None:
    for sizes in ((8, 5, 4, 3, 4), (30, 2, 20, 21, 9), (0, 3, 2, 2, 1), (3, 900, 5, 5, 3)):
        problem = half_problem(sizes, dtype)
        for args in arguments(problem, name):
            check_half(getattr(ops, name), name, args, dtype, exact=True)
            if problem.annotations.num_items == 8:
                op_checks.check_layouts(getattr(ops, name), halved(name, args, dtype))
                tests = ("test_schema", "test_faketensor")
                torch.library.opcheck(getattr(ops, name).default, halved(name, args, dtype), test_utils=tests)


@dtypes
def test_every_number_is_read_as_it_is(dtype: torch.dtype) -> None:
    check_every_number(ops.label_log_likelihood, dtype)


@dtypes
def test_select_keeps_the_dtype(dtype: torch.dtype) -> None:
    confusion = torch.randn(300, 5, 7).to(dtype)
    chosen = torch.randint(300, (1000,), generator=torch.Generator().manual_seed(0))
    assert_same(ops.select(confusion, chosen), confusion[chosen])


@native
def test_annotators_out_of_range_are_refused_before_their_matrices_are_read() -> None:
    for name in ("mix", "label_log_likelihood", "em_step"):
        args = halved(name, arguments(make(), name)[-1], torch.bfloat16)
        args = op_checks.changed(name, args, annotator=lambda t: t + 10**6)
        with pytest.raises(RuntimeError, match="out of range"):
            getattr(ops, name)(*args)


# The losses


@dtypes
@each_loss
@pytest.mark.parametrize("order", [1, 2])
def test_values_and_gradients_are_those_of_converted_matrices(name: str, order: int, dtype: torch.dtype) -> None:
    p = make()
    loss = losses(p, dtype)[name]
    scores, confusion = p.scores.float(), matrices(p, name, dtype)
    ours = gradients(loss, scores, confusion, order)
    wanted = gradients(lambda z, w: loss(z, w.float()), scores, confusion, order)
    for one, other in zip(ours, wanted, strict=True):
        assert one.dtype == other.dtype
        rounded = order == 2 or name == "pairs" or one.dtype == dtype  # gradients are, to the dtype of their leaf
        eps = 4 * torch.finfo(dtype).eps * (1 + other.abs().max().item()) if rounded else 1e-5
        assert_close(one, other, rtol=eps, atol=eps)
    assert ours[0].dtype == torch.float32 and dtype in {g.dtype for g in ours}


@pytest.mark.slow
@dtypes
def test_gradients_of_the_weight(dtype: torch.dtype) -> None:
    """They read rows of the matrices: the derivative of `label_log_likelihood` for its weight, of both orders."""
    p = make()
    z, stored, rest = p.scores.float(), p.stored.to(dtype), p.annotations
    both = []
    for table in (stored, stored.float()):
        weight, w = leaf(p.weight.float()), leaf(table)
        value = (F.label_log_likelihood(w, rest, weight=weight) * z).sum()
        value = value + F.crowd_marginal_nll(z.log_softmax(1), w, rest, normalization="none", weight=weight)
        value = value + F.crowd_mixture_nll(z.log_softmax(1), w, rest, weight=weight, reduction="sum")
        (first,) = torch.autograd.grad(value, weight, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), w)[0]
        of_weight = partial(F.label_log_likelihood, table, rest)
        change = torch.func.jvp(lambda u, f=of_weight: f(weight=u), (p.weight.float(),), (first.detach(),))
        both.append((value, first, second.to(dtype), *change))
    for one, other in zip(*both, strict=True):
        eps = 4 * torch.finfo(one.dtype).eps * (1 + other.abs().max().item())
        assert_close(one, other, rtol=eps, atol=max(eps, 1e-5))


@pytest.mark.quick(6)
@dtypes
@each_loss
def test_forward_mode_and_transforms(name: str, dtype: torch.dtype) -> None:
    p = make()
    loss, scores, confusion = losses(p, dtype)[name], p.scores.float(), matrices(p, name, dtype)
    tangents = torch.randn(scores.shape), torch.randn(confusion.shape).to(dtype)
    primals = scores, confusion
    wide = primals[0], primals[1].float()
    value, change = torch.func.jvp(loss, primals, tangents)
    wanted = torch.func.jvp(loss, wide, (tangents[0], tangents[1].float()))
    tolerance = 20 * torch.finfo(dtype).eps if name == "pairs" else 1e-5
    for one, other in zip((value, change), wanted, strict=True):
        assert one.dtype == torch.float32
        assert_close(one, other, rtol=tolerance, atol=tolerance)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, v) for t, v in zip(primals, tangents, strict=True)]
        assert torch.equal(forward_ad.unpack_dual(loss(*duals)).tangent, change)
    grad = torch.func.grad(lambda z, w: loss(z, w).square().sum(), argnums=1)
    assert grad(*primals).dtype == dtype
    rows = torch.stack([scores, 2 * scores])
    batched = torch.func.vmap(loss, (0, None))(rows, confusion)
    assert_close(batched, torch.stack([loss(z, confusion) for z in rows]), rtol=1e-5, atol=1e-5)
    each = torch.func.vmap(grad, (0, None))(rows, confusion)
    assert_close(each, torch.stack([grad(z, confusion) for z in rows]), rtol=2e-2, atol=2e-2)
    torch.func.jacfwd(torch.func.jacrev(lambda z: loss(z, confusion).square().sum()))(scores)


@dtypes
@each_loss
def test_autocast_changes_nothing(name: str, dtype: torch.dtype) -> None:
    p = make()
    loss, leaves = losses(p, dtype)[name], [leaf(p.scores.float()), leaf(matrices(p, name, dtype))]
    with torch.autocast("cpu", torch.bfloat16):
        inside = loss(*leaves)
        raw = ops.mix(p.scores.to(dtype), p.confusion.to(dtype), *p.index)
    assert inside.dtype == raw.dtype == torch.float32
    assert_close(inside, loss(*leaves), rtol=1e-5, atol=1e-5)
    inside.sum().backward()
    assert leaves[1].grad is not None and leaves[1].grad.dtype == dtype


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["softmax", "mixture softplus", "marginal softmax", "pairs"])
def test_compiled_equals_eager(name: str) -> None:
    torch._dynamo.reset()
    p = make()
    loss = losses(p, torch.bfloat16)[name]
    compiled = torch.compile(lambda z, w: loss(z, w).square().sum(), fullgraph=True, backend="aot_eager")
    both = []
    for function in (compiled, lambda z, w: loss(z, w).square().sum()):
        leaves = [leaf(p.scores.float()), leaf(matrices(p, name, torch.bfloat16))]
        value = function(*leaves)
        value.backward()
        both.append((value.detach(), *(t.grad for t in leaves)))
    for one, other in zip(*both, strict=True):
        assert one.dtype == other.dtype
        assert_close(one, other)


class Largest(TorchDispatchMode):
    """The most elements of a floating tensor, but those in `allowed`, that an op gives back."""

    def __init__(self, allowed: torch.dtype) -> None:
        super().__init__()
        self.allowed, self.most = allowed, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != self.allowed:
                self.most = max(self.most, tensor.numel())
        return out


@dtypes
@each_loss
@pytest.mark.parametrize("autocast", [False, True])
def test_no_copy_of_the_matrices_is_made(name: str, autocast: bool, dtype: torch.dtype) -> None:
    p = make(num_annotators=500)
    loss, scores, confusion = losses(p, dtype)[name], p.scores.float(), matrices(p, name, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Largest(dtype) as seen:
        loss(scores, confusion)
    assert 0 < seen.most < confusion.numel() / 5


@dtypes
@pytest.mark.parametrize("name", list(losses(make(), torch.float16, sparse_grad=True)))
def test_sparse_gradients_need_no_copy_either(name: str, dtype: torch.dtype) -> None:
    p = make(num_annotators=500)
    w = leaf(matrices(p, name, dtype))
    with Largest(dtype) as seen:
        losses(p, dtype, sparse_grad=True)[name](p.scores.float(), w).backward()
    dense = gradients(losses(p, dtype)[name], p.scores.float(), w, 1)
    assert 0 < seen.most < w.numel() / 5
    assert w.grad is not None and w.grad.is_sparse and w.grad.dtype == dtype
    assert dense[-1].dtype == dtype and w.grad.to_dense().isfinite().all()


def test_rows_in_double_precision_raise_all() -> None:
    p = make()
    confusion = p.confusion.half()
    loss = F.crowd_cross_entropy(p.scores, confusion, p.annotations)
    assert loss.dtype == torch.float64
    assert_close(loss, F.crowd_cross_entropy(p.scores, confusion.double(), p.annotations))
    (args,) = [to(a, torch.float64) for a in make_pairs(p, 2).arguments("pair_confusion")]
    mixed = F.pair_confusion(args[0].float(), args[1].half(), p.annotations)
    assert mixed.dtype == torch.float32
    assert_close(mixed, F.pair_confusion(args[0].float(), args[1].half().float(), p.annotations))


def test_reference_of_every_stage_is_in_single() -> None:
    stored = torch.randn(2, 3, 4).half()
    for kind in (reference.NONE, reference.SOFTMAX, reference.SOFTPLUS):
        for function in (reference.log_confusion, reference.activation, reference.activation_grad):
            assert torch.equal(function(stored, kind), function(stored.float(), kind))
