"""The public losses: derivatives of every order, reductions, dtypes, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import assert_close
from support.losses import losses
from support.op_checks import check_both_orders, leaf
from support.problems import Problem, make_problem
from torch import Tensor
from torch.autograd import gradcheck

import crowdnal.functional as F
from crowdnal import reference
from crowdnal.functional._autograd.mixture_link import MixtureLink, MixtureLinkBackward
from crowdnal.functional._autograd.softmax_link import SoftmaxLink, SoftmaxLinkBackward

REDUCTIONS = ["mean", "sum", "none", "item_mean", "per_item"]
NORMALIZATIONS = ["none", "softmax", "softplus"]
pytestmark = pytest.mark.usefixtures("op_kernels")


@pytest.fixture
def problem() -> Problem:
    return make_problem(5, 4, 4, 3, 3, seed=5)


@pytest.fixture
def small() -> Problem:
    """For the checks whose cost is that of full Jacobians of Jacobians."""
    return make_problem(3, 2, 3, 2, 2, seed=6)


def test_primitives_to_second_order(problem: Problem) -> None:
    a, scores, confusion = problem.annotations, leaf(problem.scores), leaf(problem.confusion)
    grad = leaf(problem.grad(3))
    check_both_orders(lambda z, w: F.mix(z, w, a), (scores, confusion))
    check_both_orders(lambda g, w: F.mix_items(g, w, a), (grad, confusion))
    check_both_orders(lambda z, g: F.mix_annotators(z, g, a), (scores, grad))
    check_both_orders(lambda g: F.segment_sum(g, a), (grad,))


@pytest.mark.quick(2)
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("shared", ["none", "added", "mixed"])
@pytest.mark.parametrize("with_weight", [True, False])
def test_softmax_link_to_second_order(small: Problem, mean: bool, shared: str, with_weight: bool) -> None:
    p = small
    optional = [
        None if shared == "none" else leaf(p.shared),
        leaf(p.mixing) if shared == "mixed" else None,
        leaf(p.weight) if with_weight else None,
    ]

    def both(z: Tensor, w: Tensor, *rest: Tensor) -> Any:
        given = iter(rest)
        s, m, u = (next(given) if o is not None else None for o in optional)
        return SoftmaxLink.run(z, w, s, m, u, *p.index, p.annotations.label, mean)[:2]

    check_both_orders(both, (leaf(p.scores), leaf(p.confusion), *(o for o in optional if o is not None)))


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", [reference.NONE, reference.SOFTMAX, reference.SOFTPLUS])
@pytest.mark.parametrize("mean", [True, False])
def test_mixture_link_to_second_order(small: Problem, kind: int, mean: bool) -> None:
    p = small

    def both(z: Tensor, w: Tensor, u: Tensor | None) -> Any:
        return MixtureLink.run(z.log_softmax(1), w, u, *p.index, p.annotations.label, kind, mean)[:2]

    check_both_orders(both, (leaf(p.scores), leaf(p.stored), leaf(p.weight)))
    assert gradcheck(lambda z, w: both(z, w, None), (leaf(p.scores), leaf(p.stored)))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "needs",
    [(True, False, False, True), (False, True, True, False), (True, True, False, False), (False, False, False, True)],
)
def test_backward_functions_respect_what_is_needed(small: Problem, needs: tuple[bool, ...]) -> None:
    p, label = small, small.annotations.label
    total, nll = torch.tensor(0.4, dtype=torch.double, requires_grad=True), leaf(p.grad(1).squeeze(1))

    def softmax(g: Tensor, n: Tensor, z: Tensor, w: Tensor, s: Tensor, m: Tensor, u: Tensor) -> Any:
        probs = reference.softmax_link(z, w, s, m, None, *p.index, label, False)[2].detach()
        out = SoftmaxLinkBackward.run(g, n, z, w, s, m, u, *p.index, label, probs, True, *needs)
        return tuple(o for o, need in zip(out, needs, strict=True) if need)

    tensors = (total, nll, leaf(p.scores), leaf(p.confusion), leaf(p.shared), leaf(p.mixing), leaf(p.weight))
    assert gradcheck(softmax, tensors, check_forward_ad=True)

    def mixture(g: Tensor, n: Tensor, z: Tensor, w: Tensor, u: Tensor) -> Any:
        posterior = reference.mixture_link(z, w, None, *p.index, label, reference.SOFTPLUS, False)[2].detach()
        rest = (*p.index, label, posterior, None, reference.SOFTPLUS, False, *needs[:2])
        out = MixtureLinkBackward.run(g, n, z, w, u, *rest)
        return tuple(o for o, need in zip(out, needs, strict=False) if need)

    if not any(needs[:2]):
        return
    assert gradcheck(mixture, (total, nll, leaf(p.scores), leaf(p.stored), leaf(p.weight)), check_forward_ad=True)


def test_values_are_those_of_the_definition(problem: Problem) -> None:
    p, a = problem, problem.annotations
    for i in range(a.num_items):
        for n in range(int(a.indptr[i]), int(a.indptr[i + 1])):
            r, y = int(a.annotator[n]), int(a.label[n])
            h = p.scores[i] @ p.confusion[r] + p.shared[i]
            loss = F.crowd_cross_entropy(p.scores, p.confusion, a, shared=p.shared, reduction="none")
            assert_close(loss[n], -torch.log(h.exp()[y] / h.exp().sum()))
            softplus = torch.nn.functional.softplus(p.confusion[r])
            matrix = softplus / softplus.sum(1, keepdim=True)
            loss = F.crowd_mixture_nll(p.scores.log_softmax(1), p.stored, a, normalization="softplus", reduction="none")
            assert_close(loss[n], -torch.log(p.scores[i].softmax(0) @ matrix[:, y]))


@pytest.mark.parametrize("weighted", [False, True])
def test_reductions(problem: Problem, weighted: bool) -> None:
    p, a = problem, problem.annotations
    weight = p.weight if weighted else torch.ones_like(p.weight)
    for each, total, mean, item, per_item in zip(
        *(losses(p, r, p.weight if weighted else None) for r in ("none", "sum", "mean", "item_mean", "per_item")),
        strict=True,
    ):
        nll = each(p.scores, p.confusion)
        assert nll.shape == (a.num_annotations,)
        assert_close(total(p.scores, p.confusion), nll.sum())
        assert_close(mean(p.scores, p.confusion), nll.sum() / weight.sum())
        items = [slice(int(a.indptr[i]), int(a.indptr[i + 1])) for i in range(a.num_items)]
        means = [nll[s].sum() / weight[s].sum() for s in items if s.stop > s.start]
        assert_close(item(p.scores, p.confusion), torch.stack(means).mean())
        assert_close(per_item(p.scores, p.confusion), nll.sum() / len(means))


def test_items_whose_labels_weigh_nothing_are_not_counted(problem: Problem) -> None:
    p, a = problem, problem.annotations
    weight = p.weight.where(a.item == a.item[0], 0.0)
    for each, per_item in zip(*(losses(p, r, weight) for r in ("none", "per_item")), strict=True):
        assert_close(per_item(p.scores, p.confusion), each(p.scores, p.confusion).sum())


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weight_gradient(problem: Problem, reduction: str) -> None:
    p = problem
    for i in range(2):
        assert gradcheck(lambda w, i=i: losses(p, reduction, w)[i](p.scores, p.confusion), (leaf(p.weight + 0.1),))


def test_annotations_own_weight_is_the_default(problem: Problem) -> None:
    p = problem
    expected = [loss(p.scores, p.confusion) for loss in losses(p, "mean", p.weight)]
    p.annotations.weight = p.weight
    for loss, wanted in zip(losses(p, "mean"), expected, strict=True):
        assert torch.equal(loss(p.scores, p.confusion), wanted)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("num_items", [0, 3])
def test_no_annotations_is_zero_loss_and_zero_gradient(reduction: str, num_items: int) -> None:
    p = make_problem(num_items, 2, 3, 3, 0, seed=0)
    for loss in losses(p, reduction) + losses(p, reduction, p.weight):
        scores, confusion = leaf(p.scores), leaf(p.confusion)
        value = loss(scores, confusion).sum()
        value.backward()
        assert value.item() == 0
        assert scores.grad is not None and confusion.grad is not None
        assert scores.grad.eq(0).all() and confusion.grad.eq(0).all()


def test_zero_weights_are_zero_loss(problem: Problem) -> None:
    for reduction in REDUCTIONS:
        for loss in losses(problem, reduction, torch.zeros_like(problem.weight)):
            scores = leaf(problem.scores)
            value = loss(scores, problem.confusion).sum()
            value.backward()
            assert value.item() == 0 and scores.grad is not None and scores.grad.eq(0).all()


def test_upstream_gradients(problem: Problem) -> None:
    p = problem
    for loss in losses(p, "none"):
        n = p.annotations.num_annotations
        upstream = p.grad(1).squeeze(1)
        for given in (upstream, torch.ones(1, dtype=torch.double).expand(n), p.grad(2)[:, 0]):
            scores, confusion = leaf(p.scores), leaf(p.confusion)
            ours = torch.autograd.grad(loss(scores, confusion), (scores, confusion), given)
            summed = torch.autograd.grad((loss(scores, confusion) * given).sum(), (scores, confusion))
            for a, b in zip(ours, summed, strict=True):
                assert_close(a, b)
    for loss in losses(p, "mean"):
        scores = leaf(p.scores)
        value = loss(scores, p.confusion)
        (once,) = torch.autograd.grad(value, scores, retain_graph=True)
        (again,) = torch.autograd.grad(3 * value, scores)
        assert_close(again, 3 * once)


@pytest.mark.parametrize("which", ["scores", "confusion"])
def test_inputs_that_need_no_gradient(problem: Problem, which: str) -> None:
    for loss in losses(problem, "mean"):
        scores, confusion = leaf(problem.scores), leaf(problem.confusion)
        both = torch.autograd.grad(loss(scores, confusion), (scores, confusion))
        pair = {"scores": scores.detach(), "confusion": confusion.detach()}
        pair[which].requires_grad_()
        (alone,) = torch.autograd.grad(loss(**{"z": pair["scores"], "w": pair["confusion"]}), pair[which])
        assert torch.equal(alone, both[0 if which == "scores" else 1])
        before = pair["scores"].detach().clone()
        loss(pair["scores"], pair["confusion"])
        assert torch.equal(before, pair["scores"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_inputs_are_computed_in_float32(problem: Problem, dtype: torch.dtype) -> None:
    for loss in losses(problem, "mean"):
        scores, confusion = leaf(problem.scores.to(dtype)), leaf(problem.confusion.to(dtype))
        value = loss(scores, confusion.float())
        assert value.dtype == torch.float32
        assert_close(value.double(), loss(scores.double(), confusion.double()), rtol=1e-5, atol=1e-5)
        (grad,) = torch.autograd.grad(value, scores)
        assert grad.dtype == dtype and grad.isfinite().all()


@pytest.mark.installed_kernels
def test_autocast_computes_the_loss_in_float32(problem: Problem) -> None:
    p = problem
    scores, confusion = p.scores.float(), p.confusion.float()
    for loss in losses(p, "mean"):
        with torch.autocast("cpu", torch.bfloat16):
            inside = loss(scores, confusion)
        assert_close(inside, loss(scores, confusion), rtol=1e-6, atol=1e-6)
        assert inside.dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            raw = torch.ops.crowdnal.mix(scores.bfloat16(), confusion, *p.index)
        assert raw.dtype == torch.float32


def test_confident_scores_stay_finite() -> None:
    p = make_problem(6, 3, 4, 4, 4, seed=1, scale=1000.0)
    for dtype in (torch.bfloat16, torch.float32):
        for loss in losses(p, "none"):
            scores, confusion = leaf(p.scores.to(dtype)), leaf(p.confusion.to(dtype))
            value = loss(scores, confusion)
            value.sum().backward()
            assert value.isfinite().all()
            assert scores.grad is not None and scores.grad.isfinite().all()
            assert confusion.grad is not None and confusion.grad.isfinite().all()


def test_errors_name_the_argument(problem: Problem) -> None:
    p, a = problem, problem.annotations
    with pytest.raises(ValueError, match="num_annotators=4"):
        F.crowd_cross_entropy(p.scores, p.confusion[:3], a)
    with pytest.raises(ValueError, match="observed labels.*num_classes=3"):
        F.crowd_mixture_nll(p.scores, p.confusion, a)
    with pytest.raises(ValueError, match="scores has shape"):
        F.mix(p.scores[:, :2], p.confusion, a)
    with pytest.raises(ValueError, match="shared has shape"):
        F.crowd_cross_entropy(p.scores, p.confusion, a, shared=p.scores)
    with pytest.raises(ValueError, match="weight has shape"):
        F.crowd_cross_entropy(p.scores, p.confusion, a, weight=p.weight[:-1])
    with pytest.raises(ValueError, match="give shared too"):
        F.crowd_cross_entropy(p.scores, p.confusion, a, mixing=p.mixing)
    with pytest.raises(ValueError, match="mixing has shape"):
        F.crowd_cross_entropy(p.scores, p.confusion, a, shared=p.shared, mixing=p.mixing[1:])
    with pytest.raises(ValueError, match="reduction='max'"):
        F.crowd_cross_entropy(p.scores, p.confusion, a, reduction="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="normalization='sigmoid'"):
        F.crowd_mixture_nll(p.scores, p.stored, a, normalization="sigmoid")  # type: ignore[arg-type]
