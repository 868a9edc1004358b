"""`sparse_grad=True`: the same numbers, only for the annotators of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from support.compare import assert_close
from support.problems import Problem, make_problem, problems
from torch import Tensor

import crowdnal
import crowdnal.functional as F
from crowdnal.objectives import CrowdLayer, TraceRegularized

Loss = Callable[[Problem, Tensor, bool], Tensor]


def cross_entropy(p: Problem, confusion: Tensor, sparse: bool) -> Tensor:
    return F.crowd_cross_entropy(p.scores, confusion, p.annotations, shared=p.shared, sparse_grad=sparse)


def mixture(p: Problem, stored: Tensor, sparse: bool) -> Tensor:
    log_probs = p.scores.log_softmax(1)
    return F.crowd_mixture_nll(log_probs, stored, p.annotations, normalization="softplus", sparse_grad=sparse)


def leaf_of(p: Problem, loss: Loss) -> Tensor:
    return (p.confusion if loss is cross_entropy else p.stored).clone().requires_grad_()


@pytest.mark.parametrize("loss", [cross_entropy, mixture])
@settings(max_examples=15, deadline=None)
@given(problem=problems())
def test_equals_the_dense_gradient(loss: Loss, problem: Problem) -> None:
    sparse, dense = leaf_of(problem, loss), leaf_of(problem, loss)
    values = []
    for leaf in (sparse, dense):
        values.append(loss(problem, leaf, leaf is sparse))
        values[-1].backward()
    assert_close(*values)
    assert sparse.grad is not None and dense.grad is not None and sparse.grad.is_sparse
    assert_close(sparse.grad.to_dense(), dense.grad)
    touched = problem.annotations.annotator.unique()
    assert torch.equal(sparse.grad.coalesce().indices()[0], touched)


@pytest.mark.parametrize("loss", [cross_entropy, mixture])
def test_second_order_equals_that_of_the_dense_gradient(loss: Loss) -> None:
    problem = make_problem(6, 9, 4, 3, 4, seed=3)
    direction = torch.randn(leaf_of(problem, loss).shape, dtype=torch.double)
    results = []
    for sparse in (True, False):
        leaf = leaf_of(problem, loss)
        (grad,) = torch.autograd.grad(loss(problem, leaf, sparse), leaf, create_graph=True)
        ((grad.to_dense() if sparse else grad) * direction).sum().backward()
        assert leaf.grad is not None
        results.append(leaf.grad.to_dense() if sparse else leaf.grad)
    assert_close(*results)


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    torch.optim.SparseAdam,
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["crowd-layer", "trace"])
def test_objectives_learn_with_sparse_optimizers(kind: str, optimizer: Any) -> None:
    p = make_problem(40, 30, 4, 4, 2, seed=1)
    p.annotations.annotator.clamp_(max=19)  # ten annotators without annotations
    p.annotations._order = None
    objective: Any
    if kind == "crowd-layer":
        objective = CrowdLayer(4, 30, sparse_grad=True)
    else:
        objective = TraceRegularized(4, 30, scope="batch", sparse_grad=True)
    weight = objective.annotators.weight
    start, step = weight.detach().clone(), optimizer(objective.parameters())
    losses = []
    for _ in range(20):
        step.zero_grad()
        loss = objective(p.scores, p.annotations)
        loss.backward()
        assert weight.grad.is_sparse
        step.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] and all(a > b for a, b in zip(losses, losses[1:], strict=False))
    changed = (weight.detach() != start).flatten(1).any(1)
    assert torch.equal(changed.nonzero().squeeze(1), p.annotations.annotator.unique())


def test_what_a_batch_touches_moves_with_it() -> None:
    a = make_problem(6, 50, 3, 3, 3, seed=2).annotations.prepare(active=True)
    moved = a.to("cpu")
    assert moved._active_annotators is not None and moved._active_index is not None
    assert torch.equal(moved.active_annotators, a.annotator.unique())
    assert torch.equal(moved.active_annotators[moved.active_index], a.annotator)
    picked = a[[0, 1]]
    assert torch.equal(picked.active_annotators, picked.annotator.unique())


@settings(max_examples=20, deadline=None)
@given(problem=problems(max_matrices=2000))
def test_active_annotators_and_index(problem: Problem) -> None:
    a = problem.annotations
    assert torch.equal(a.active_annotators, a.annotator.unique())
    assert torch.equal(a.active_annotators[a.active_index], a.annotator)


def test_says_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="scope='batch'"):
        TraceRegularized(3, 2, sparse_grad=True)
    with pytest.raises(ValueError, match="variant='MW'"):
        CrowdLayer(3, 2, variant="VW", sparse_grad=True)
    p = make_problem(4, 3, 3, 3, 3, seed=0)
    compiled = torch.compile(lambda w: cross_entropy(p, w, True), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="sparse_grad=True cannot be compiled"):
        compiled(leaf_of(p, cross_entropy))


def test_select_copies_matrices_and_reads_nothing_else() -> None:
    op = torch.ops.crowdnal.select
    for dtype in (torch.float32, torch.float64):
        confusion = torch.randn(300, 5, 7, dtype=dtype)
        chosen = torch.randint(300, (1000,), generator=torch.Generator().manual_seed(0))
        assert torch.equal(op(confusion, chosen), confusion[chosen])
        assert torch.equal(op(confusion.transpose(1, 2), chosen), confusion.transpose(1, 2)[chosen])
        assert op(confusion, chosen[:0]).shape == (0, 5, 7)
        torch.library.opcheck(op.default, (confusion, chosen), test_utils=("test_schema", "test_faketensor"))
    if crowdnal.backend()["cpu"] == "native":
        with pytest.raises(RuntimeError, match=r"annotators\[1\] = 300 is out of range"):
            op(confusion, torch.tensor([0, 300]))


def test_half_precision_keeps_its_dtype() -> None:
    p = make_problem(6, 9, 4, 3, 4, seed=3)
    leaf = p.confusion.bfloat16().requires_grad_()
    F.crowd_cross_entropy(p.scores.float(), leaf, p.annotations, sparse_grad=True).backward()
    assert leaf.grad is not None and leaf.grad.is_sparse and leaf.grad.dtype == torch.bfloat16
