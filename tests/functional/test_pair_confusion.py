"""LIA's pair confusion: values, extremes, derivatives of every order, transforms, compilation, objectives."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import assert_close
from support.op_checks import leaf
from support.pairs import Pairs, impossible, make_pairs
from support.problems import Problem, make_problem
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck

import crowdnal
import crowdnal.functional as F
from crowdnal import reference
from crowdnal.functional._autograd.pair_confusion import PairConfusion, PairConfusionBackward

pytestmark = pytest.mark.usefixtures("op_kernels")


@pytest.fixture
def case() -> Pairs:
    return make_pairs(make_problem(5, 4, 4, 3, 3, seed=5), 2)


def test_values_are_those_of_the_definition() -> None:
    case = make_pairs(make_problem(6, 4, 3, 5, 3, seed=5), 2)
    log_q = F.pair_confusion(case.difficulty, case.competence, case.annotations)
    a = case.annotations
    for n in range(a.num_annotations):
        pair = (case.difficulty[a.item[n]] + case.competence[a.annotator[n]]).exp().sum(2)
        assert_close(log_q[n], (pair / pair.sum(1, keepdim=True))[:, a.label[n]].log())


def test_one_latent_without_competence_is_a_softmax_of_difficulty() -> None:
    case = make_pairs(make_problem(8, 3, 4, 6, 3, seed=7), 1)
    log_q = F.pair_confusion(case.difficulty, torch.zeros_like(case.competence), case.annotations)
    rows = case.difficulty.squeeze(3).log_softmax(2)[case.annotations.item]
    assert_close(log_q, rows.gather(2, case.annotations.label[:, None, None].expand(-1, 4, 1)).squeeze(2))


@pytest.mark.parametrize("shift", [3.0, -1000.0, 1000.0])
def test_a_constant_changes_nothing(shift: float) -> None:
    case = make_pairs(make_problem(8, 3, 9, 6, 3, seed=7), 3)
    added = shift * torch.rand(9, 1, 1, dtype=torch.double)  # one constant a class
    for difficulty, competence in ((added, 0.0), (0.0, added), (added, -added)):
        moved = case.difficulty + difficulty, case.competence + competence
        ours = [torch.func.grad(lambda d, c: (F.pair_confusion(d, c, case.annotations) * case.grad).sum(), (0, 1))]
        for function in (*ours, lambda d, c: (F.pair_confusion(d, c, case.annotations),)):
            for a, b in zip(function(*moved), function(case.difficulty, case.competence), strict=True):
                assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
def test_impossible_pairs_give_no_nan(dtype: torch.dtype) -> None:
    case = impossible()
    a, label = case.annotations, case.annotations.label
    difficulty, competence = leaf(case.difficulty.to(dtype)), leaf(case.competence.to(dtype))
    log_q = F.pair_confusion(difficulty, competence, a)
    none = (a.item == 1) & (a.annotator < 2)
    assert none.any() and log_q[none, 2].eq(-torch.inf).all()
    assert log_q[(a.item % 2 == 0) & (label == 1), 0].eq(-torch.inf).all()
    assert not log_q.isnan().any() and log_q.isfinite().float().mean() > 0.7
    # a class that explains nothing has no posterior, and gives the others' gradients no NaN
    F.segment_sum(log_q, a).logsumexp(1).sum().backward()
    finite = [leaf(t.clamp(min=-500)) for t in case.inputs[:2]]  # in double: the same to 1e-200
    F.segment_sum(F.pair_confusion(*finite, a), a).logsumexp(1).sum().backward()
    assert difficulty.grad is not None and competence.grad is not None and finite[0].grad is not None
    assert difficulty.grad.isfinite().all() and competence.grad.isfinite().all()
    same = torch.arange(12) != 1  # for item 1, -500 twice is no impossible class
    assert_close(difficulty.grad[same].double(), finite[0].grad[same], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", [0, 1])
def test_nan_is_not_hidden(where: int) -> None:
    case = make_pairs(make_problem(6, 2, 3, 3, 4, seed=2), 2)
    case.inputs[where][0, 1, 2, 0] = torch.nan
    hit = (case.annotations.item, case.annotations.annotator)[where] == 0
    for dtype in (torch.float, torch.double):
        inputs = [leaf(t.to(dtype)) for t in case.inputs[:2]]
        log_q = F.pair_confusion(*inputs, case.annotations)
        assert hit.any() and log_q[hit, 1].isnan().all() and log_q[:, ::2].isfinite().all()
        log_q.sum().backward()
        grad = inputs[where].grad
        assert grad is not None and grad[0, 1].isnan().all() and grad[:, ::2].isfinite().all()


# Sizes


@pytest.mark.parametrize("sizes", [(1, 4, 3, 3, 2), (6, 1, 3, 3, 2), (6, 4, 1, 3, 2), (6, 4, 3, 1, 2), (6, 4, 3, 3, 1)])
def test_sizes_of_one(sizes: tuple[int, ...]) -> None:
    items, annotators, classes, labels, latents = sizes
    case = make_pairs(make_problem(items, annotators, classes, labels, 6, seed=1), latents)
    leaves = leaf(case.difficulty), leaf(case.competence)
    log_q = F.pair_confusion(*leaves, case.annotations)
    assert_close(log_q, reference.pair_confusion(*case.inputs)[0])
    ours = torch.autograd.grad(log_q, leaves, case.grad)
    wanted = reference.pair_confusion_backward(*case.backward_inputs((True, True)))
    for a, b in zip(ours, wanted, strict=True):
        assert_close(a, b)
    if labels == 1:  # what is certain says nothing
        assert log_q.eq(0).all() and all(g.eq(0).all() for g in ours)


@pytest.mark.parametrize("num_items", [0, 3])
def test_empty_batches_have_zero_gradients(num_items: int) -> None:
    case = make_pairs(make_problem(num_items, 2, 3, 3, 0, seed=0), 2)
    leaves = leaf(case.difficulty), leaf(case.competence)
    log_q = F.pair_confusion(*leaves, case.annotations)
    assert log_q.shape == (0, 3)
    grads = torch.autograd.grad(log_q.sum(), leaves, create_graph=True)
    assert all(g.shape == t.shape and g.eq(0).all() for g, t in zip(grads, leaves, strict=True))
    again = torch.autograd.grad(sum(g.sum() for g in grads), leaves, allow_unused=True)
    assert all(g is None or g.eq(0).all() for g in again)


def test_unseen_annotators_and_items_have_zero_gradients_and_repeated_pairs_count_twice() -> None:
    annotations = crowdnal.Annotations(
        torch.tensor([0, 2, 2, 3]), torch.tensor([1, 1, 3]), torch.tensor([0, 0, 2]), num_annotators=5, num_classes=3
    )
    case = make_pairs(Problem(annotations, *[torch.zeros(5, 4, 3)] * 3, torch.ones(3), 0), 2)
    leaves = leaf(case.difficulty), leaf(case.competence)
    log_q = F.pair_confusion(*leaves, annotations)
    grads = torch.autograd.grad(log_q.sum(), leaves)
    assert torch.equal(log_q[0], log_q[1])
    assert grads[0][1].eq(0).all() and grads[1][[0, 2, 4]].eq(0).all() and grads[1][[1, 3]].ne(0).all()
    once = torch.autograd.grad(F.pair_confusion(*leaves, annotations)[0].sum(), leaves)
    assert_close(grads[0][0], 2 * once[0][0])


def test_errors_name_the_argument() -> None:
    case = make_pairs(make_problem(6, 4, 3, 5, 3, seed=5), 2)
    d, c, a = case.difficulty, case.competence, case.annotations
    with pytest.raises(ValueError, match=r"competence has shape .*num_annotators=4"):
        F.pair_confusion(d, c[:3], a)
    with pytest.raises(ValueError, match=r"competence has shape .*num_annotators=4"):
        F.pair_confusion(d, c[..., 0], a)
    with pytest.raises(ValueError, match=r"competence has shape .*num_classes=5"):
        F.pair_confusion(d.mT, c.transpose(1, 2), a)
    with pytest.raises(ValueError, match="L at least 1"):
        F.pair_confusion(d[..., :0], c[..., :0], a)
    with pytest.raises(ValueError, match=r"difficulty has shape .*\[num_items, C, num_classes, L\] = \(6, 3, 5, 2\)"):
        F.pair_confusion(d[..., :1], c, a)


# Derivatives


def test_to_second_order() -> None:
    case = make_pairs(make_problem(3, 2, 3, 2, 2, seed=6), 2)
    rest = case.inputs[2:]
    inputs = leaf(case.difficulty), leaf(case.competence)

    def function(difficulty: Tensor, competence: Tensor) -> Tensor:
        return PairConfusion.run(difficulty, competence, *rest)[0]

    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)])
def test_backward_respects_what_is_needed(needs: tuple[bool, bool]) -> None:
    case = make_pairs(make_problem(3, 2, 3, 2, 2, seed=6), 2)
    rest = case.inputs[2:]

    def function(grad: Tensor, difficulty: Tensor, competence: Tensor) -> Any:
        outputs = reference.pair_confusion(difficulty.detach(), competence.detach(), *rest)
        out = PairConfusionBackward.run(grad, difficulty, competence, *rest, *outputs, *needs)
        assert [o.shape[0] > 0 for o in out] == list(needs)
        return tuple(o for o, need in zip(out, needs, strict=True) if need)

    inputs = leaf(case.grad), leaf(case.difficulty), leaf(case.competence)
    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)


def test_blocks_change_no_derivative(monkeypatch: pytest.MonkeyPatch, case: Pairs) -> None:
    leaves, grad = [leaf(case.difficulty), leaf(case.competence)], leaf(case.grad)
    tangents = tuple(torch.ones_like(t) * torch.arange(2) for t in leaves)

    def derivatives() -> list[Tensor]:
        def function(*inputs: Tensor) -> Tensor:
            return F.pair_confusion(*inputs, case.annotations)

        first = torch.autograd.grad(function(*leaves), leaves, grad, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (*leaves, grad))
        return [torch.func.jvp(function, tuple(t.detach() for t in leaves), tangents)[1], *second]

    wanted = derivatives()
    assert case.annotations.num_annotations > 3
    monkeypatch.setattr(sys.modules[PairConfusion.__module__], "BLOCK_NUMBERS", 50)  # two annotations
    for ours, expected in zip(derivatives(), wanted, strict=True):
        assert_close(ours, expected)


def test_impossible_pairs_give_no_nan_to_second_order() -> None:
    case = impossible()
    leaves = leaf(case.difficulty), leaf(case.competence)

    def loss(difficulty: Tensor, competence: Tensor) -> Tensor:
        return F.pair_confusion(difficulty, competence, case.annotations).exp()

    first = torch.autograd.grad(loss(*leaves).sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    assert all(g.isfinite().all() and g.ne(0).any() for g in second)
    tangents = tuple(torch.ones_like(t) * torch.arange(2) for t in leaves)
    assert torch.func.jvp(loss, tuple(t.detach() for t in leaves), tangents)[1].isfinite().all()


@pytest.mark.parametrize("which", [0, 1])
def test_inputs_that_need_no_gradient(case: Pairs, which: int) -> None:
    leaves = [leaf(case.difficulty), leaf(case.competence)]
    both = torch.autograd.grad(F.pair_confusion(*leaves, case.annotations).square().sum(), leaves)
    leaves[1 - which] = leaves[1 - which].detach()
    (alone,) = torch.autograd.grad(F.pair_confusion(*leaves, case.annotations).square().sum(), leaves[which])
    assert torch.equal(alone, both[which])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(case: Pairs, dtype: torch.dtype) -> None:
    leaves = leaf(case.difficulty.to(dtype)), leaf(case.competence.to(dtype))
    log_q = F.pair_confusion(*leaves, case.annotations)
    assert log_q.dtype == torch.float32
    wanted = F.pair_confusion(*(t.double() for t in leaves), case.annotations)
    assert_close(log_q.double(), wanted, rtol=1e-5, atol=1e-5)
    assert all(g.dtype == dtype and g.isfinite().all() for g in torch.autograd.grad(log_q.sum(), leaves))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.ops.crowdnal.pair_confusion(*leaves, *case.inputs[2:])[0].dtype == torch.float32


def test_functorch_transforms_agree_with_autograd(case: Pairs) -> None:
    grad, inputs = case.grad, case.inputs[:2]

    def loss(difficulty: Tensor, competence: Tensor) -> Tensor:
        return (F.pair_confusion(difficulty, competence, case.annotations) * grad).square().sum()

    wanted = torch.autograd.functional.hessian(loss, inputs)
    for i in range(2):
        diagonal = wanted[i][i]
        assert_close(torch.func.hessian(loss, argnums=i)(*inputs), diagonal)
        assert_close(torch.func.jacrev(torch.func.jacfwd(loss, i), i)(*inputs), diagonal)
        assert_close(torch.func.jacrev(torch.func.grad(loss, i), i)(*inputs), diagonal)


@pytest.mark.parametrize("in_dims", [(0, None), (None, 2), (1, 0)])
def test_vmap_equals_a_loop(case: Pairs, in_dims: tuple[int | None, int | None]) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [
        base if dim is None else torch.stack([base + torch.randn(base.shape, generator=generator) for _ in "abc"], dim)
        for base, dim in zip(case.inputs[:2], in_dims, strict=True)
    ]

    def function(difficulty: Tensor, competence: Tensor) -> Tensor:
        return F.pair_confusion(difficulty, competence, case.annotations)

    def each(function: Callable[..., Any]) -> list[Any]:
        return [
            function(*(t if d is None else t.select(d, v) for t, d in zip(inputs, in_dims, strict=True)))
            for v in range(3)
        ]

    assert_close(torch.vmap(function, in_dims)(*inputs), torch.stack(each(function)))
    for argnums in ((0, 1), (0,), (1,)):
        grad = torch.func.grad(lambda d, c: function(d, c).square().sum(), argnums=argnums)
        for ours, *wanted in zip(torch.vmap(grad, in_dims)(*inputs), *each(grad), strict=True):
            assert_close(ours, torch.stack(wanted))


@pytest.mark.quick(1)
@pytest.mark.installed_kernels
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled_step_equals_eager_without_recompiles(backend: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def step(log_h: Tensor, difficulty: Tensor, competence: Tensor, annotations: Any) -> Tensor:
        log_q = F.pair_confusion(difficulty.tanh(), competence, annotations)
        return -(log_h + F.segment_sum(log_q, annotations)).logsumexp(1).sum()

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for seed, per_item in enumerate([3, 5, 2, 4, 6]):  # ragged: another number of annotations each time
        case = make_pairs(make_problem(16, 7, 4, 3, per_item, seed=seed), 2)
        leaves = leaf(case.problem.scores.log_softmax(1)), leaf(case.difficulty), leaf(case.competence)
        values = [function(*leaves, case.annotations) for function in (compiled, step)]
        assert_close(*values)
        for ours, wanted in zip(*(torch.autograd.grad(v, leaves) for v in values), strict=True):
            assert_close(ours, wanted)
    assert counter.frame_count == 1


# Objectives


def test_objectives_equal_a_dense_computation() -> None:
    """M-step and marginal likelihood from [B, R, C, K] probabilities and a [B, R] table of labels."""
    annotations = crowdnal.Annotations.from_dense(
        torch.tensor([[0, 2, -1], [-1, -1, 1], [-1, -1, -1], [2, 2, 0]]), num_classes=3
    )
    problem = Problem(annotations, torch.zeros(4, 3), torch.zeros(3, 3, 3), torch.zeros(4, 3), torch.zeros(6), 3)
    case = make_pairs(problem, 2)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, dtype=torch.double, generator=generator).requires_grad_()
    posterior = torch.randn(4, 3, dtype=torch.double, generator=generator).softmax(1)
    leaves = leaf(case.difficulty), leaf(case.competence), logits

    log_q = F.pair_confusion(leaves[0], leaves[1], annotations)
    log_joint = logits.log_softmax(1) + F.segment_sum(log_q, annotations)
    ours = -(posterior * log_joint).sum(), -log_joint.logsumexp(1).sum()

    positive = torch.einsum("bckl,rckl->brck", leaves[0].exp(), leaves[1].exp())
    q = positive / positive.sum(3, keepdim=True)
    labels = annotations.to_dense()
    chosen = q.gather(3, labels.clamp(min=0)[:, :, None, None].expand(4, 3, 3, 1)).squeeze(3)
    likelihood = torch.where(labels[:, :, None] >= 0, chosen, 1.0).prod(1)
    joint = logits.softmax(1) * likelihood
    dense = -(posterior * joint.log()).sum(), -joint.sum(1).log().sum()
    for value, wanted in zip(ours, dense, strict=True):
        assert_close(value, wanted)
        grads = [torch.autograd.grad(v, leaves, retain_graph=True) for v in (value, wanted)]
        for a, b in zip(*grads, strict=True):
            assert_close(a, b)
