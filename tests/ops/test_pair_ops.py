"""The ops of the pair confusion against the reference: values, layouts, determinism, memory, raw arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from support import op_checks
from support.compare import assert_close, assert_same
from support.op_checks import check_huge_values, fast, leaf, native, to_float
from support.pairs import NAMES, Pairs, impossible, make_pairs, pairs
from support.problems import make_problem

from crowdnal import reference

ops = torch.ops.crowdnal


@pytest.mark.parametrize("name", NAMES)
@fast
@given(case=pairs())
def test_op_equals_reference(name: str, case: Pairs) -> None:
    for args in case.arguments(name):
        op_checks.check_values(getattr(ops, name), getattr(reference, name), args)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", NAMES)
@fast
@given(case=pairs())
def test_float32_error_is_at_most_that_of_eager(name: str, case: Pairs) -> None:
    for args in case.arguments(name):
        op_checks.check_float_error(getattr(ops, name), getattr(reference, name), args)


@fast
@given(case=pairs())
def test_reference_backward_is_the_derivative(case: Pairs) -> None:
    difficulty, competence, *rest = case.inputs
    leaves = leaf(difficulty), leaf(competence)
    log_q, _ = reference.pair_confusion(*leaves, *rest)
    wanted = torch.autograd.grad(log_q, leaves, case.grad)
    ours = reference.pair_confusion_backward(*case.backward_inputs((True, True)))
    assert_close(tuple(ours), wanted, rtol=1e-9, atol=1e-9, where="gradient")


@pytest.mark.parametrize("name", NAMES)
def test_layout_does_not_matter(name: str) -> None:
    for args in make_pairs(make_problem(9, 5, 6, 4, 4, seed=8), 3).arguments(name):
        layouts = [(args, tuple(op_checks.non_contiguous(a) for a in args))]
        if name == "pair_confusion_backward":
            ones = torch.ones_like(args[0])
            layouts.append(((ones, *args[1:]), (ones[:1, :1].expand(ones.shape), *args[1:])))
        for usual, other in layouts:
            assert_same(getattr(ops, name)(*other), getattr(ops, name)(*usual), "output")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("sizes", [(64, 9, 8, 8, 6), (3, 1, 5, 7, 4000), (200, 40, 18, 30, 5), (0, 3, 2, 2, 1)])
def test_bitwise_equal_over_runs_and_threads(name: str, scale: float, sizes: tuple[int, ...]) -> None:
    case = make_pairs(make_problem(*sizes, seed=3), 2, scale)
    for args in case.arguments(name)[:1]:
        for dtyped in (args, to_float(args)):
            op_checks.check_bitwise(getattr(ops, name), dtyped)


@native
def test_nothing_of_size_annotations_times_tensor_is_allocated() -> None:
    case = make_pairs(make_problem(40, 30, 16, 16, 200, seed=0), 4)  # gathered, about 4,000 tensors of 4 kB
    difficulty, competence, *rest = to_float(case.inputs)
    leaves = difficulty.requires_grad_(), competence.requires_grad_()
    with torch.profiler.profile(profile_memory=True) as profile:
        ops.pair_confusion(*leaves, *rest)[0].sum().backward()
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    numbers = 4 * (difficulty.numel() + competence.numel()) + 8 * case.annotations.num_annotations * 16
    assert 0 < allocated < 4 * numbers < 4 * case.annotations.num_annotations * 16 * 16 * 4 / 4


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    for args in make_pairs(make_problem(5, 4, 3, 3, 3, seed=1), 2).arguments(name):
        op_checks.check_opcheck(getattr(ops, name), args)


@native
@pytest.mark.parametrize(
    ("argument", "change", "message"),
    [
        ("difficulty", lambda t: t[:, :, :, :1], "difficulty has the wrong shape"),
        ("competence", lambda t: t[..., 0], "competence must have 4 dimensions"),
        ("competence", lambda t: t[..., :0], "at least one class"),
        ("indptr", lambda t: t + 1, "indptr"),
        ("annotator", lambda t: t + 10, "annotator"),
        ("order", lambda t: t.flip(0), "order"),
        ("label", lambda t: t - 1, "label"),
        ("label", lambda t: t + 5, "label"),
    ],
)
def test_native_ops_refuse_what_would_read_out_of_bounds(argument: str, change: Any, message: str) -> None:
    case = make_pairs(make_problem(6, 4, 3, 3, 4, seed=2), 2)
    for name in NAMES:
        args = op_checks.changed(name, case.arguments(name)[0], **{argument: change})
        with pytest.raises(RuntimeError, match=message):
            getattr(ops, name)(*args)


@pytest.mark.parametrize("name", NAMES)
def test_huge_values_are_right_in_float32(name: str) -> None:
    check_huge_values(getattr(ops, name), name)


@pytest.mark.parametrize("name", NAMES)
def test_impossible_pairs_equal_the_reference(name: str) -> None:
    for args in impossible().arguments(name):
        assert_close(getattr(ops, name)(*args), getattr(reference, name)(*args), where="output")
