"""The ops of the joint link against the plain PyTorch reference: values, layouts, determinism, raw arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import op_checks
from support.compare import assert_close
from support.op_arguments import JOINT, NORMALIZATIONS, arguments, far_below_zero
from support.op_checks import fast, native
from support.problems import Problem, make_problem, problems

from crowdnal import reference

ops = torch.ops.crowdnal
each_op = pytest.mark.parametrize("name", JOINT)
CROWDED = make_problem(300, 2, 3, 4, 9, seed=7)  # so many annotations for each cell that `label_counts` goes by tables
LONG = make_problem(2, 1, 60, 40, 1500, seed=7)  # one annotator's run beyond a block, without tables


@each_op
@fast
@given(problem=problems() | st.sampled_from([CROWDED, LONG]), kind=st.sampled_from(NORMALIZATIONS))
def test_op_equals_reference(name: str, problem: Problem, kind: int) -> None:
    for args in arguments(problem, name, kind):
        op_checks.check_values(getattr(ops, name), getattr(reference, name), args)
        op_checks.check_float_error(getattr(ops, name), getattr(reference, name), args)


@each_op
@pytest.mark.parametrize("problem", [CROWDED, LONG], ids=["crowded", "long"])
def test_long_segments_equal_reference(name: str, problem: Problem) -> None:
    for args in arguments(problem, name):
        op_checks.check_values(getattr(ops, name), getattr(reference, name), args)


@pytest.mark.parametrize("per_item", [2, 40])  # fewer and more annotations of an annotator than labels
@pytest.mark.parametrize("kind", [reference.SOFTMAX, reference.SOFTPLUS])
def test_stored_values_far_below_zero(kind: int, per_item: int) -> None:
    for name in ("joint_link", "joint_link_backward"):
        op_checks.check_far_below_zero(getattr(ops, name), name, kind, far_below_zero(20, per_item))


@each_op
@fast
@given(problem=problems(max_matrices=40_000) | st.just(CROWDED))
def test_layout_does_not_matter(name: str, problem: Problem) -> None:
    for args in arguments(problem, name):
        op_checks.check_layouts(getattr(ops, name), args)


@native
@each_op
@pytest.mark.parametrize(
    "sizes", [(64, 9, 8, 8, 6), (3, 1, 5, 7, 4000), (3, 1, 60, 50, 3000), (200, 40, 33, 30, 5), (0, 3, 2, 2, 1)]
)
def test_bitwise_equal_over_runs_and_threads(name: str, sizes: tuple[int, ...]) -> None:
    problem = make_problem(*sizes, seed=3)
    for kind in (reference.NONE, reference.SOFTPLUS):
        for args in arguments(problem, name, kind):
            for dtyped in (args, op_checks.to_float(args)):
                op_checks.check_bitwise(getattr(ops, name), dtyped)


@pytest.mark.quick(1)
@each_op
def test_opcheck(name: str) -> None:
    for kind in NORMALIZATIONS if name.startswith("joint") else (reference.NONE,):
        for args in arguments(make_problem(5, 4, 3, 3, 3, seed=1), name, kind):
            op_checks.check_opcheck(getattr(ops, name), args, differentiable=name != "em_step")


@pytest.mark.parametrize("name", ["label_log_likelihood", "label_counts", "joint_link"])
@fast
@given(problem=problems(max_matrices=60_000), kind=st.sampled_from(NORMALIZATIONS))
def test_first_gradients_equal_autograd_of_the_reference(name: str, problem: Problem, kind: int) -> None:
    for args in arguments(problem, name, kind):
        op_checks.check_first_gradients(getattr(ops, name), getattr(reference, name), args)


@native
def test_long_segments_lose_no_accuracy() -> None:
    """One annotator, 200,000 annotations in float32, by tables and in one run."""
    nnz = 200_000
    index = (torch.arange(nnz + 1), torch.arange(nnz), torch.zeros(nnz, dtype=torch.long), torch.arange(nnz), None)
    values, label = torch.rand(nnz, 3), torch.zeros(nnz, dtype=torch.long)
    for num_labels in (1, 20_000):
        out = ops.label_counts(values, None, *index, label, 1, num_labels)
        assert_close(out[0, 0].double(), values.double().sum(0), rtol=1e-6, atol=0)


@native
def test_native_ops_refuse_what_would_read_out_of_bounds() -> None:
    p = make_problem(6, 4, 2, 3, 4, seed=2)
    changes: list[tuple[str, str, Callable[[Any], Any], str]] = [
        ("label_log_likelihood", "label", lambda t: t + 1, r"label\[\d+\] = 3"),
        ("label_log_likelihood", "weight", lambda t: t[1:], "weight"),
        ("label_log_likelihood", "annotator", lambda t: t + 4, "annotator"),
        ("label_log_likelihood", "indptr", lambda t: t + 1, "indptr"),
        ("label_counts", "values", lambda t: t[1:], "values"),
        ("label_counts", "values", lambda t: t[0], "2 dimensions"),
        ("label_counts", "weight", lambda t: t.float(), "dtype"),
        ("label_counts", "order", lambda t: t * 0, "order"),
        ("label_counts", "num_annotators", lambda n: n - 2, "annotator"),
        ("label_counts", "num_labels", lambda n: n - 1, "label"),
        ("label_counts", "num_labels", lambda n: -1, "must not be negative"),
        ("joint_link", "log_prior", lambda t: t[:, 1:], "log_prior"),
        ("joint_link", "order", lambda t: t.flip(0), "order"),
        ("joint_link", "confusion", lambda t: t[..., :0], "at least one class"),
        ("em_step", "log_prior", lambda t: t[:, 1:], "log_prior"),
        ("em_step", "log_prior", lambda t: None, "labels must be the classes"),
        ("em_step", "indptr", lambda t: t.flip(0), "indptr"),
        ("em_step", "annotator", lambda t: t + 4, "out of range"),
        ("em_step", "label", lambda t: t - 3, "out of range"),
        ("em_step", "label", lambda t: t[1:], "label must have shape"),
        ("joint_link_backward", "grad_nll", lambda t: t[1:], "grad_nll"),
        ("joint_link_backward", "posterior", lambda t: t[1:], "posterior"),
    ]
    for name, argument, change, message in changes:
        args = op_checks.changed(name, arguments(p, name)[-1], **{argument: change})
        with pytest.raises(RuntimeError, match=message):
            getattr(ops, name)(*args)
