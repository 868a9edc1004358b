"""The joint link and its statistics: derivatives of both orders, the public functions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import op_checks
from support.compare import assert_close
from support.op_checks import leaf
from support.problems import Problem, make_problem
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck

import crowdnal.functional as F
from crowdnal import reference
from crowdnal.data import Annotations
from crowdnal.functional._autograd.joint_link import JointLink, JointLinkBackward

KINDS = {"none": reference.NONE, "softmax": reference.SOFTMAX, "softplus": reference.SOFTPLUS}


@pytest.fixture
def problem() -> Problem:
    return make_problem(6, 4, 4, 3, 3, seed=7)  # with an item that has no annotations


@pytest.fixture
def small() -> Problem:
    """For the checks whose cost is that of full Jacobians of Jacobians."""
    return make_problem(4, 2, 3, 2, 2, seed=6)


@pytest.mark.parametrize("weighted", [True, False])
def test_statistics_to_second_order(problem: Problem, weighted: bool) -> None:
    a = problem.annotations
    for function, values in ((F.label_log_likelihood, problem.stored), (F.label_counts, problem.scores)):
        if weighted:
            inputs = (leaf(values), leaf(problem.weight))
            op_checks.check_both_orders(lambda v, w, f=function: f(v, a, weight=w), inputs)
        else:
            op_checks.check_both_orders(lambda v, f=function: f(v, a), (leaf(values),))


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize("mean", [True, False])
def test_joint_link_to_second_order(small: Problem, kind: int, mean: bool) -> None:
    p = small

    def outputs(z: Tensor, w: Tensor, u: Tensor | None) -> Any:
        return JointLink.run(z.log_softmax(1), w, u, *p.index, p.annotations.label, kind, mean)[:3]

    op_checks.check_both_orders(outputs, (leaf(p.scores), leaf(p.stored), leaf(p.weight)))
    assert gradcheck(lambda z, w: outputs(z, w, None), (leaf(p.scores), leaf(p.stored)))


@pytest.mark.quick(2)
@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)])
def test_backward_function_respects_what_is_needed(small: Problem, needs: tuple[bool, bool]) -> None:
    p, label = small, small.annotations.label

    def backward(g: Tensor, n: Tensor, z: Tensor, w: Tensor, u: Tensor) -> Any:
        posterior = reference.joint_link(z, w, u, *p.index, label, reference.SOFTPLUS, True)[2].detach()
        out = JointLinkBackward.run(g, n, z, w, u, *p.index, label, posterior, None, reference.SOFTPLUS, True, *needs)
        return tuple(o for o, need in zip(out, needs, strict=True) if need)

    total = torch.tensor(0.4, dtype=torch.double, requires_grad=True)
    inputs = (total, leaf(torch.randn(4, dtype=torch.double)), leaf(p.scores), leaf(p.stored), leaf(p.weight))
    assert gradcheck(backward, inputs, check_forward_ad=True)


def test_functorch_transforms_agree_with_autograd(problem: Problem) -> None:
    def loss(z: Tensor, w: Tensor) -> Tensor:
        return F.crowd_marginal_nll(z.log_softmax(1), w, problem.annotations, normalization="softplus")

    wanted = torch.autograd.functional.hessian(lambda w: loss(problem.scores, w), problem.stored)
    rev, fwd = torch.func.jacrev, torch.func.jacfwd
    each = [lambda f, n, a=a, b=b: a(b(f, n), n) for a, b in ((rev, rev), (rev, fwd), (fwd, rev))]
    for hessian in each:
        assert_close(hessian(loss, 1)(problem.scores, problem.stored), wanted)


@pytest.mark.parametrize("in_dims", [(0, None, None), (None, 2, 0), (1, 0, None)])
def test_vmap_equals_a_loop(problem: Problem, in_dims: tuple[int | None, ...]) -> None:
    p, generator = problem, torch.Generator().manual_seed(0)
    inputs = [
        base if dim is None else torch.stack([base * (1 + 0.1 * v) for v in range(3)], dim)
        for base, dim in zip((p.scores, p.stored, p.weight), in_dims, strict=True)
    ]

    def losses(z: Tensor, w: Tensor, u: Tensor) -> Tensor:
        given = (z.log_softmax(1), w, p.annotations)
        nll = F.crowd_marginal_nll(*given, weight=u, reduction="none")
        counts = F.label_counts(F.crowd_posterior(*given, weight=u), p.annotations, weight=u)
        return torch.cat([nll, F.crowd_marginal_nll(*given, weight=u).reshape(1), counts.flatten()])

    mixing = torch.randn(losses(p.scores, p.stored, p.weight).shape, dtype=torch.double, generator=generator)
    grad = torch.func.grad(lambda *args: losses(*args) @ mixing, argnums=(0, 1, 2))
    for function in (losses, grad):
        each = [
            op_checks.as_tuple(
                function(*(t if d is None else t.select(d, v) for t, d in zip(inputs, in_dims, strict=True)))
            )
            for v in range(3)
        ]
        for ours, *wanted in zip(op_checks.as_tuple(torch.vmap(function, in_dims)(*inputs)), *each, strict=True):
            assert_close(ours, torch.stack(wanted))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("reduction", "backend"), [("mean", "inductor"), ("none", "aot_eager")])
def test_compiled_step_equals_eager_without_recompiles(reduction: Any, backend: str) -> None:
    def step(features: Tensor, linear: Tensor, confusion: Tensor, annotations: Annotations) -> Tensor:
        prior = (features @ linear).log_softmax(1)
        nll = F.crowd_marginal_nll(prior, confusion, annotations, reduction=reduction).sum()
        posterior = F.crowd_posterior(prior, confusion, annotations, normalization="softplus")
        return nll + F.label_log_likelihood(F.label_counts(posterior, annotations), annotations).square().sum()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for seed, per_item in enumerate([3, 5, 2, 4, 6]):  # ragged: another number of annotations each time
        p = make_problem(16, 7, 4, 3, per_item, seed=seed)
        features = torch.randn(16, 5, dtype=torch.double)
        parameters = [torch.randn(5, 4, dtype=torch.double, requires_grad=True), leaf(p.stored)]
        values = [function(features, *parameters, p.annotations) for function in (compiled, step)]
        assert_close(*values)
        for ours, wanted in zip(*(torch.autograd.grad(v, parameters) for v in values), strict=True):
            assert_close(ours, wanted)
    assert counter.frame_count == 1


# The public functions


@pytest.mark.parametrize("normalization", KINDS)
def test_equals_brute_force(problem: Problem, normalization: Any) -> None:
    p, a = problem, problem.annotations
    confusion = p.stored.log_softmax(1) if normalization == "none" else p.stored
    probability = reference.log_confusion(confusion, KINDS[normalization]).exp()
    prior = p.scores.log_softmax(1)
    nll = F.crowd_marginal_nll(prior, confusion, a, normalization=normalization, weight=p.weight, reduction="none")
    posterior = F.crowd_posterior(prior, confusion, a, normalization=normalization, weight=p.weight)
    counts = torch.zeros_like(p.stored)
    for i in range(a.num_items):
        joint = prior[i].exp()
        for n in range(int(a.indptr[i]), int(a.indptr[i + 1])):
            joint = joint * probability[a.annotator[n], a.label[n]] ** p.weight[n]
            counts[a.annotator[n], a.label[n]] += p.weight[n] * posterior[i]
        assert_close(nll[i], -joint.sum().log())
        assert_close(posterior[i], joint / joint.sum())
    assert_close(F.label_counts(posterior, a, weight=p.weight), counts)
    assert (a.counts == 0).any()
    total = F.crowd_marginal_nll(prior, confusion, a, normalization=normalization, weight=p.weight, reduction="sum")
    mean = F.crowd_marginal_nll(prior, confusion, a, normalization=normalization, weight=p.weight)
    assert_close(total, nll.sum())
    assert_close(mean, nll.sum() / (a.counts > 0).sum())
    a.weight = p.weight
    assert torch.equal(F.crowd_marginal_nll(prior, confusion, a, normalization=normalization), mean)
    assert torch.equal(F.label_counts(posterior, a), F.label_counts(posterior, a, weight=p.weight))


@pytest.mark.parametrize("num_items", [0, 3])
def test_no_annotations_is_zero_loss_and_zero_gradient(num_items: int) -> None:
    p = make_problem(num_items, 2, 3, 3, 0, seed=0)
    for reduction in ("mean", "sum", "none"):
        scores, confusion = leaf(p.scores), leaf(p.stored)
        value = F.crowd_marginal_nll(scores, confusion, p.annotations, reduction=reduction).sum()  # type: ignore[arg-type]
        value.backward()
        assert value.item() == 0
        assert scores.grad is not None and scores.grad.eq(0).all()
        assert confusion.grad is not None and confusion.grad.eq(0).all()
    assert_close(F.crowd_posterior(p.scores, p.stored, p.annotations), p.scores.softmax(1))
    assert (
        F.label_counts(p.scores, p.annotations).eq(0).all()
        and F.label_log_likelihood(p.stored, p.annotations).eq(0).all()
    )


def impossible() -> tuple[Annotations, Tensor]:
    """Two annotators who never err: the first item's labels contradict each other, the third item's agree."""
    labels = Annotations([0, 2, 3, 5], [0, 1, 0, 0, 1], [0, 1, 1, 1, 1], num_annotators=2, num_classes=2)
    return labels, torch.eye(2, dtype=torch.double).log().expand(2, 2, 2)


def test_impossible_classes() -> None:
    labels, confusion = impossible()
    prior = leaf(torch.full((3, 2), 0.5, dtype=torch.double).log())
    confusion = leaf(confusion)
    posterior = F.crowd_posterior(prior, confusion, labels, normalization="none")
    assert posterior.tolist() == [[0, 0], [0, 1], [0, 1]]
    nll = F.crowd_marginal_nll(prior, confusion, labels, normalization="none", reduction="none")
    assert nll[0] == math.inf
    assert_close(nll[1:], torch.full((2,), math.log(2), dtype=torch.double))
    grads = torch.autograd.grad(nll[1:].sum() + posterior.square().sum(), (prior, confusion), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), (prior, confusion))
    assert all(g.isfinite().all() for g in (*grads, *second))


def test_weight_zero_of_an_impossible_label_changes_nothing() -> None:
    labels, confusion = impossible()
    weight = leaf(torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0]))
    prior = torch.full((3, 2), 0.5, dtype=torch.double).log()
    assert F.label_log_likelihood(confusion, labels, weight=weight).tolist() == [[-math.inf, 0], [-math.inf, 0], [0, 0]]
    nll = F.crowd_marginal_nll(prior, confusion, labels, normalization="none", weight=weight)
    nll.backward()
    assert nll.isfinite() and weight.grad is not None and weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_and_autocast_compute_in_float32(problem: Problem, dtype: torch.dtype) -> None:
    p = problem
    scores, confusion = p.scores.to(dtype), p.stored.to(dtype)
    wanted = F.crowd_marginal_nll(scores.double(), confusion.double(), p.annotations)
    with torch.autocast("cpu", torch.bfloat16):
        inside = F.crowd_marginal_nll(scores, confusion, p.annotations)
    for value in (inside, F.crowd_marginal_nll(scores, confusion, p.annotations)):
        assert value.dtype == torch.float32
        assert_close(value.double(), wanted, rtol=1e-5, atol=1e-5)


def test_errors_name_the_argument(problem: Problem) -> None:
    p, a = problem, problem.annotations
    with pytest.raises(ValueError, match="num_annotators=4"):
        F.crowd_marginal_nll(p.scores, p.stored[:3], a)
    with pytest.raises(ValueError, match="observed labels.*num_classes=3"):
        F.label_log_likelihood(p.confusion, a)
    with pytest.raises(ValueError, match="log_prior has shape"):
        F.crowd_posterior(p.scores[:, :2], p.stored, a)
    with pytest.raises(ValueError, match=r"posterior has shape \(5, 4\)"):
        F.label_counts(p.scores[1:], a)
    with pytest.raises(ValueError, match="weight has shape"):
        F.label_counts(p.scores, a, weight=p.weight[:-1])
    with pytest.raises(ValueError, match="reduction='item_mean'"):
        F.crowd_marginal_nll(p.scores, p.stored, a, reduction="item_mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="normalization='sigmoid'"):
        F.crowd_posterior(p.scores, p.stored, a, normalization="sigmoid")  # type: ignore[arg-type]
