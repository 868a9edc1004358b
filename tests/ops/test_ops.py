"""The ops against the plain PyTorch reference: values, first gradients, layouts, determinism, raw arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import op_checks
from support.compare import assert_close
from support.op_arguments import MIXTURE, NORMALIZATIONS, SOFTMAX, arguments, far_below_zero
from support.op_checks import fast, native, to_float
from support.problems import Problem, make_problem, problems
from torch import Tensor

from crowdnal import reference

ops = torch.ops.crowdnal


@pytest.mark.parametrize("name", SOFTMAX + MIXTURE)
@fast
@given(problem=problems(), kind=st.sampled_from(NORMALIZATIONS))
def test_op_equals_reference(name: str, problem: Problem, kind: int) -> None:
    for args in arguments(problem, name, kind):
        op_checks.check_values(getattr(ops, name), getattr(reference, name), args)


@pytest.mark.parametrize("name", SOFTMAX + MIXTURE)
@fast
@given(problem=problems(), kind=st.sampled_from(NORMALIZATIONS))
def test_float32_error_is_at_most_that_of_eager(name: str, problem: Problem, kind: int) -> None:
    for args in arguments(problem, name, kind):
        op_checks.check_float_error(getattr(ops, name), getattr(reference, name), args)


@pytest.mark.parametrize("name", ["softmax_link", "mixture_link"])
@fast
@given(problem=problems(max_matrices=60_000), kind=st.sampled_from(NORMALIZATIONS))
def test_first_gradients_equal_autograd_of_the_reference(name: str, problem: Problem, kind: int) -> None:
    for args in arguments(problem, name, kind):
        both = (lambda *given, op=op: op(*given)[:2] for op in (getattr(ops, name), getattr(reference, name)))
        op_checks.check_first_gradients(*both, args)


@fast
@given(problem=problems(max_matrices=60_000))
def test_what_is_common_takes_the_place_of_a_shared_term(problem: Problem) -> None:
    args = arguments(problem, "softmax_link_step")[5]
    args = op_checks.changed("softmax_link_step", args, scores=lambda t: t.softmax(1), shared=lambda _: None)
    op_checks.check_values(ops.softmax_link_step, reference.softmax_link_step, args)
    op_checks.check_float_error(ops.softmax_link_step, reference.softmax_link_step, args)
    op_checks.check_layouts(ops.softmax_link_step, args)
    op_checks.check_bitwise(ops.softmax_link_step, to_float(args))


@pytest.mark.parametrize("sizes", [(9, 4, 5, 5, 4), (9, 4, 20, 17, 4), (9, 4, 3, 40, 4)])
def test_a_prior_of_rows_far_apart(sizes: tuple[int, ...]) -> None:
    """Whose exponentials over- and underflow."""
    for scale in (100.0, 1e4):
        args = arguments(make_problem(*sizes, seed=4, scale=scale), "softmax_link_step")[5]
        op_checks.check_values(ops.softmax_link_step, reference.softmax_link_step, args)
        out = ops.softmax_link_step(*to_float(args))
        wanted = reference.softmax_link_step(*args)
        assert_close(out[0].double(), wanted[0], rtol=1e-5)
        assert_close(out[3].double(), wanted[3], rtol=1e-3, atol=1e-3 * float(wanted[3].abs().max()))


@pytest.mark.parametrize("labels", [3, 20])
@pytest.mark.parametrize("per_item", [2, 40])  # fewer and more annotations of an annotator than labels
@pytest.mark.parametrize("kind", [reference.SOFTMAX, reference.SOFTPLUS])
def test_stored_values_far_below_zero(kind: int, labels: int, per_item: int) -> None:
    for name in MIXTURE:
        op_checks.check_far_below_zero(getattr(ops, name), name, kind, far_below_zero(labels, per_item))


@pytest.mark.parametrize("name", SOFTMAX + MIXTURE)
@fast
@given(problem=problems(max_matrices=40_000))
def test_layout_does_not_matter(name: str, problem: Problem) -> None:
    for args in arguments(problem, name):
        op_checks.check_layouts(getattr(ops, name), args)


@pytest.mark.parametrize("name", SOFTMAX + MIXTURE)
@pytest.mark.parametrize("sizes", [(64, 9, 8, 8, 6), (3, 1, 5, 7, 4000), (200, 40, 33, 30, 5), (0, 3, 2, 2, 1)])
def test_bitwise_equal_over_runs_and_threads(name: str, sizes: tuple[int, ...]) -> None:
    problem = make_problem(*sizes, seed=3)
    for args in arguments(problem, name):
        for dtyped in (args, to_float(args)):
            op_checks.check_bitwise(getattr(ops, name), dtyped)


@native
def test_long_segments_lose_no_accuracy() -> None:
    """One annotator, 200,000 annotations in float32: blocks keep the error of a sum near one rounding."""
    nnz = 200_000
    index = (torch.arange(nnz + 1), torch.arange(nnz), torch.zeros(nnz, dtype=torch.long), torch.arange(nnz), None)
    grad = torch.rand(nnz, 3)
    out = ops.mix_annotators(torch.ones(nnz, 1), grad, *index, 1)
    assert_close(out[0, 0].double(), grad.double().sum(0), rtol=3e-6, atol=0)


@native
def test_nothing_of_size_annotations_times_matrix_is_allocated() -> None:
    problem = make_problem(2000, 2, 64, 64, 5, seed=0)  # about 5,000 annotations: 82 MB if matrices were gathered
    args = to_float(arguments(problem, "softmax_link")[0])
    leaves = [a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    with torch.profiler.profile(profile_memory=True) as profile:
        ops.softmax_link(*leaves)[0].backward()
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    assert 0 < allocated < 12 * problem.annotations.num_annotations * 64 * 4


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", SOFTMAX + MIXTURE)
def test_opcheck(name: str) -> None:
    for kind in NORMALIZATIONS if name in MIXTURE else (reference.SOFTMAX,):
        for args in arguments(make_problem(5, 4, 3, 3, 3, seed=1), name, kind):
            op_checks.check_opcheck(getattr(ops, name), args)


@native
@pytest.mark.parametrize(
    ("argument", "change", "message"),
    [
        ("indptr", lambda t: t + 1, "indptr"),
        ("item", lambda t: t.flip(0), "item"),
        ("annotator", lambda t: t - 1, "annotator"),
        ("annotator", lambda t: t + 10, "annotator"),
        ("annotator", lambda t: t.int(), "annotator must be int64"),
        ("order", lambda t: t.flip(0), "order"),
        ("order", lambda t: t * 0, "order"),
        ("scores", lambda t: t[:-1], "scores"),
        ("grad", lambda t: t[:-1], "grad"),
        ("grad", lambda t: t.float(), "dtype"),
    ],
)
def test_native_ops_refuse_what_would_read_out_of_bounds(argument: str, change: Any, message: str) -> None:
    args = arguments(make_problem(6, 4, 3, 3, 4, seed=2), "mix_annotators")[0]
    with pytest.raises(RuntimeError, match=message):
        ops.mix_annotators(*op_checks.changed("mix_annotators", args, **{argument: change}))


@native
def test_native_ops_refuse_matrices_without_classes() -> None:
    args = arguments(make_problem(6, 4, 3, 3, 4, seed=2), "mixture_link")[0]
    args = op_checks.changed("mixture_link", args, log_probs=lambda t: t[:, :0], confusion=lambda t: t[:, :, :0])
    with pytest.raises(RuntimeError, match="at least one class"):
        ops.mixture_link(*args)


@native
@pytest.mark.parametrize("bad", [-1, 3])
def test_native_ops_refuse_labels_out_of_range(bad: int) -> None:
    args = arguments(make_problem(6, 4, 3, 3, 4, seed=2), "softmax_link")[0]
    args = op_checks.changed("softmax_link", args, label=lambda t: t.index_fill(0, torch.tensor(2), bad))
    with pytest.raises(RuntimeError, match=rf"label\[2\] = {bad}"):
        ops.softmax_link(*args)
