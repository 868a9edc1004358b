"""The CUDA kernels of the other links, on the emulator, against the reference."""

from __future__ import annotations

import pytest
import torch
from support import op_checks
from support.compare import assert_close
from support.emulated import Emulated
from support.emulated_checks import check
from support.op_arguments import MIXTURE, NORMALIZATIONS, arguments, far_below_zero
from support.problems import make_problem

from crowdnal import reference

pytestmark = pytest.mark.slow  # the kernels of CUDA are compiled for it

LINKS = [*MIXTURE, "joint_link", "joint_link_backward"]
COUNTS = ["label_log_likelihood", "label_counts", "em_step"]
# (B, R, C, K, annotations an item): both sides of every border between tiers and tiles
SIZES = [
    (0, 3, 2, 2, 1),
    (1, 1, 1, 1, 1),
    (40, 3, 8, 8, 6),
    (9, 40, 9, 5, 6),
    (5, 3, 16, 17, 7),
    (5, 3, 17, 16, 7),
    (4, 2, 33, 4, 8),
    (4, 2, 128, 3, 4),
    (3, 2, 129, 3, 40),
    (9, 30, 10, 10, 6),
    (5, 3, 12, 9, 7),
    (4, 2, 34, 20, 8),
    (4, 2, 20, 34, 8),
    # matrices of which a block owns columns: more annotations than it knows at a time, labels than it reads at a time
    (28, 1, 3, 300, 10),
    (6, 9, 40, 70, 3),
    (2, 9, 20, 34, 3),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", NORMALIZATIONS)
@pytest.mark.parametrize("name", LINKS)
def test_links_equal_the_reference(emulated: Emulated, name: str, kind: int, sizes: tuple[int, ...]) -> None:
    for args in arguments(make_problem(*sizes, seed=5), name, kind):
        check(emulated, name, args)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", COUNTS)
def test_counts_equal_the_reference(emulated: Emulated, name: str, sizes: tuple[int, ...]) -> None:
    for args in arguments(make_problem(*sizes, seed=5), name):
        check(emulated, name, args)


@pytest.mark.parametrize("per_item", [2, 40])
@pytest.mark.parametrize("kind", NORMALIZATIONS[1:])
def test_stored_values_far_below_zero(emulated: Emulated, kind: int, per_item: int) -> None:
    for name in LINKS:
        op_checks.check_far_below_zero(emulated.op(name), name, kind, far_below_zero(20, per_item, items=6))


@pytest.mark.parametrize("shift", [-200.0, -40.0, 40.0, 200.0])
@pytest.mark.parametrize("kind", NORMALIZATIONS[1:])
@pytest.mark.parametrize("per_item", [2, 12])  # what is read is the stored matrix, or the normalised one
def test_a_column_of_extreme_numbers_leaves_the_others_as_they_are(
    emulated: Emulated, kind: int, shift: float, per_item: int
) -> None:
    """Sums are of the numbers themselves; only a column where these are too large or too small goes by logarithms."""
    problem = make_problem(6, 3, 5, 20, per_item, seed=4)
    problem.confusion = problem.confusion.float().double()
    usual = [op_checks.to_float(args) for args in arguments(problem, "mixture_link", kind)]
    wanted = [emulated.op("mixture_link")(*args) for args in usual]
    problem.confusion[1, 2] += shift
    for args, (_, _, _, norm) in zip(arguments(problem, "mixture_link", kind), wanted, strict=True):
        check(emulated, "mixture_link", args)
        found = emulated.op("mixture_link")(*op_checks.to_float(args))[3]
        moved = found != norm
        assert moved[:, 2].any() and not moved[:, [0, 1, 3, 4]].any()


def test_a_weight_of_zero_adds_nothing(emulated: Emulated) -> None:
    problem = make_problem(6, 3, 4, 5, 4, seed=6)
    table = problem.stored.log_softmax(1)
    table[0] = -torch.inf
    weight = (problem.annotations.annotator != 0).double()
    args = (table, weight, *problem.index, problem.annotations.label)
    op_checks.check_values(emulated.op("label_log_likelihood"), reference.label_log_likelihood, args)
    assert emulated.op("label_log_likelihood")(*args).isfinite().all()


@pytest.mark.parametrize("labels", [2, 100])  # by masked sums, and by additions where the sums lie
def test_long_counts_lose_no_accuracy(emulated: Emulated, labels: int) -> None:
    nnz = 9_000
    index = (torch.arange(nnz + 1), torch.arange(nnz), torch.zeros(nnz, dtype=torch.long), torch.arange(nnz), None)
    values, label = torch.rand(nnz, 3), torch.zeros(nnz, dtype=torch.long)
    out = emulated.op("label_counts")(values, None, *index, label, 2, labels)
    assert_close(out[0, 0].double(), values.double().sum(0), rtol=1e-6, atol=0)
    assert not out[0, 1:].any() and not out[1].any()


def test_em_step_needs_the_order(emulated: Emulated) -> None:
    args = arguments(make_problem(6, 3, 4, 4, 4, seed=6), "em_step")[0]
    with pytest.raises(RuntimeError, match="needs the order"):
        emulated.op("em_step")(*op_checks.changed("em_step", args, order=lambda _: None))


def test_runs_of_many_annotators(emulated: Emulated) -> None:
    """More positions than a block scans, annotators missing in front, between and behind."""
    problem = make_problem(300, 500, 2, 2, 5, seed=3)
    problem.annotations.annotator.mul_(2).add_(7).clamp_(max=993)
    problem.confusion = torch.randn(1000, 2, 2, dtype=torch.double)
    annotator = problem.annotations.annotator
    index = (problem.index[0], problem.index[1], annotator, torch.argsort(annotator, stable=True), None)
    args = (problem.scores, problem.stored, None, *index, problem.annotations.label, reference.SOFTMAX, True)
    check(emulated, "mixture_link", args)
