"""The cross-entropy whose gradients come with the loss: what is handed over, and that every other way is the same."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_close
from support.problems import Problem, make_problem
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from crowdnal import functional as F
from crowdnal.functional._autograd.softmax_link import SoftmaxLink, _is_worth_a_step
from crowdnal.ops import softmax_link as ops

SIZES = [(40, 6, 5, 5, 3), (9, 30, 10, 10, 2), (64, 2, 7, 20, 40), (12, 3, 33, 34, 5), (0, 3, 2, 2, 1)]


def leaves_of(p: Problem) -> dict[str, Tensor]:
    named = {"scores": p.scores, "confusion": p.confusion, "shared": p.shared, "mixing": p.mixing, "weight": p.weight}
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in named.items()}


def loss_of(p: Problem, leaves: dict[str, Tensor]) -> Tensor:
    rest = dict(leaves)
    return F.crowd_cross_entropy(rest.pop("scores"), rest.pop("confusion"), p.annotations, **rest, reduction="sum")


def two_ops(p: Problem, leaves: dict[str, Tensor]) -> Tensor:
    return SoftmaxLink.run(*leaves.values(), *p.index, p.annotations.label, False)[0]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("factor", [1.0, -0.3])
def test_loss_and_gradients_are_those_of_the_two_ops(sizes: tuple[int, ...], factor: float) -> None:
    p = make_problem(*sizes, seed=2)
    ours, theirs = leaves_of(p), leaves_of(p)
    one, two = loss_of(p, ours), two_ops(p, theirs)
    assert_close(one, two)
    (factor * one).backward()
    (factor * two).backward()
    for name in ours:
        assert_close(ours[name].grad, theirs[name].grad)


def test_a_gradient_is_handed_over_not_copied() -> None:
    p = make_problem(40, 6, 5, 5, 3, seed=2)
    leaves = leaves_of(p)
    loss = loss_of(p, leaves)
    ready = [gradient.data_ptr() for gradient in loss.grad_fn.gradients]  # type: ignore[union-attr]
    loss.backward()
    assert ready == [leaves[name].grad.data_ptr() for name in ("scores", "confusion", "shared", "mixing")]  # type: ignore[union-attr]


@pytest.mark.parametrize("sizes", SIZES)
def test_a_second_pass_over_the_graph_has_the_same_bits(sizes: tuple[int, ...]) -> None:
    p = make_problem(*sizes, seed=2)
    leaves = leaves_of(p)
    loss = loss_of(p, leaves)
    first = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.mul_(0)  # the caller may do with it what he likes
    twice = torch.autograd.grad(2 * loss, list(leaves.values()))
    for before, after in zip(kept, twice, strict=True):
        assert torch.equal(2 * before, after)


def test_batched_and_traced_passes_are_those_of_single_ones() -> None:
    p = make_problem(40, 6, 5, 5, 3, seed=2)
    leaves = leaves_of(p)
    one = torch.autograd.grad(loss_of(p, leaves), list(leaves.values()))
    factors = torch.tensor([1.0, -2.0], dtype=p.scores.dtype)
    both = torch.autograd.grad(loss_of(p, leaves), list(leaves.values()), factors, is_grads_batched=True)

    def traced(*values: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(3 * loss_of(p, dict(zip(leaves, values, strict=True))), values)

    thrice = make_fx(traced)(*leaves.values())(*leaves.values())
    for single, batch, again in zip(one, both, thrice, strict=True):
        assert_close(batch, torch.stack([single, -2 * single]))
        assert_close(again, 3 * single)


def test_only_what_is_needed_is_computed() -> None:
    p = make_problem(40, 6, 5, 5, 3, seed=2)
    confusion = p.confusion.detach().requires_grad_()
    loss = F.crowd_cross_entropy(p.scores, confusion, p.annotations)
    assert [gradient.numel() > 0 for gradient in loss.grad_fn.gradients] == [False, True, False, False]  # type: ignore[union-attr]


def test_no_gradients_are_made_where_none_can_be_asked_for() -> None:
    p = make_problem(40, 6, 5, 5, 3, seed=2)
    leaves = leaves_of(p)
    with torch.no_grad():
        assert not loss_of(p, leaves).requires_grad
    tangent = torch.func.jvp(lambda z: F.crowd_cross_entropy(z, p.confusion, p.annotations), (p.scores,), (p.scores,))
    assert tangent[1].isfinite()


def test_a_pass_on_cuda_must_be_worth_scaling() -> None:
    class There(Tensor):
        is_cuda = True

    scores = torch.zeros(5, 8).as_subclass(There)
    for nnz, sizes, worth in ((64, (8, 8, 8), True), (63, (8, 8, 8), False), (999, (1, 33, 8), False)):
        assert _is_worth_a_step(scores, torch.zeros(sizes), torch.zeros(nnz)) == worth
        assert _is_worth_a_step(torch.zeros(5, 8), torch.zeros(sizes), torch.zeros(nnz))


def test_the_op_refuses_what_it_cannot_do() -> None:
    p = make_problem(6, 4, 3, 3, 2, seed=2)
    rest = (*p.index, p.annotations.label, True, True, True, False, False)

    def step(scores: Tensor) -> Tensor:
        return ops.softmax_link_step(scores, p.confusion, None, None, None, *rest)[0]

    with pytest.raises(RuntimeError, match="take softmax_link"):
        torch.func.jvp(step, (p.scores,), (p.scores,))
    with pytest.raises(RuntimeError, match="take softmax_link"):
        torch.func.vmap(step)(p.scores.expand(2, *p.scores.shape))
