"""The CUDA kernels of the primitives and the softmax link, on the emulator, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import op_checks
from support.compare import assert_close, assert_same
from support.emulated import Emulated
from support.emulated_checks import check
from support.op_arguments import ALL, arguments
from support.op_arguments import SOFTMAX as NAMES
from support.problems import Problem, make_problem

from crowdnal import reference

pytestmark = pytest.mark.slow  # the kernels of CUDA are compiled for it

# (B, R, C, K, annotations an item): both sides of every border between tiers and tiles
SIZES = [
    (0, 3, 2, 2, 1),
    (1, 1, 1, 1, 1),
    (40, 3, 8, 8, 6),
    (9, 4, 9, 16, 6),
    (9, 4, 16, 17, 6),
    (2, 1, 4, 3, 150),
    (6, 30, 7, 9, 3),
    (5, 3, 16, 16, 7),
    (5, 2, 32, 33, 8),
    (4, 3, 33, 32, 8),
    (3, 2, 16, 128, 4),
    (3, 2, 128, 16, 4),
    (6, 2, 20, 40, 7),
    (3, 2, 64, 65, 9),
    (2, 2, 3, 129, 5),
    (2, 2, 129, 3, 5),
    (2, 2, 130, 131, 9),
    # rows read 2 and 4 numbers at a time, and tiles of lanes that just fit a warp or just do not
    (9, 30, 10, 10, 6),
    (6, 3, 12, 8, 7),
    (5, 2, 18, 34, 8),
    (5, 3, 20, 24, 6),
    (3, 2, 36, 40, 9),
    (4, 3, 8, 32, 40),
    (4, 3, 20, 13, 40),
    # large matrices: more annotations of an annotator than share a pass, or than a block knows at a time
    (24, 1, 47, 48, 3),
    (24, 2, 20, 24, 3),
    (9, 1, 68, 72, 2),
    (3, 9, 50, 47, 2),
    (6, 11, 50, 47, 2),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_equal_the_reference(emulated: Emulated, name: str, sizes: tuple[int, ...]) -> None:
    for args in arguments(make_problem(*sizes, seed=5), name):
        check(emulated, name, args)


@pytest.mark.parametrize("shift", [1, 2, 3])
@pytest.mark.parametrize("name", [name for name in ALL if name != "select"])
def test_the_same_bits_wherever_a_tensor_begins(emulated: Emulated, name: str, shift: int) -> None:
    """Sizes whose rows are read 4 numbers at a time, and 2."""
    for sizes in ((9, 4, 8, 4, 6), (5, 3, 12, 34, 6), (4, 2, 14, 10, 9)):
        for args in arguments(make_problem(*sizes, seed=5), name):
            usual = op_checks.to_float(args)
            moved = tuple(op_checks.at_odd_address(a, shift) for a in usual)
            assert any(isinstance(a, torch.Tensor) and a.data_ptr() % 16 == 4 * shift for a in moved)
            assert_same(emulated.op(name)(*moved), emulated.op(name)(*usual), "output")


def test_select(emulated: Emulated) -> None:
    confusion = torch.randn(7, 5, 9, dtype=torch.double)
    for chosen in ([6, 0, 0, 3], []):
        check(emulated, "select", (confusion, torch.tensor(chosen, dtype=torch.long)))


def one_annotator(nnz: int) -> tuple[Any, ...]:
    return torch.arange(nnz + 1), torch.arange(nnz), torch.zeros(nnz, dtype=torch.long), torch.arange(nnz), None


def test_long_segments_lose_no_accuracy(emulated: Emulated) -> None:
    nnz = 20_000  # a third of them in the first slots of an annotator that begins inside a chunk
    indptr, item, annotator, order, plan = one_annotator(nnz)
    annotator[:17] = 0
    annotator[17:] = 1
    grad = torch.rand(nnz, 3)
    out = emulated.op("mix_annotators")(torch.ones(nnz, 1), grad, indptr, item, annotator, order, plan, 3)
    assert_close(out[1, 0].double(), grad[17:].double().sum(0), rtol=1e-6, atol=0)
    assert_close(out[0, 0].double(), grad[:17].double().sum(0), rtol=1e-6, atol=0)
    assert not out[2].any()


def test_many_parts_of_a_sum(emulated: Emulated) -> None:
    nnz = 20_000
    scores, confusion = torch.randn(nnz, 1, dtype=torch.double), torch.randn(1, 1, 2, dtype=torch.double)
    label, weight = torch.arange(nnz) % 2, torch.rand(nnz, dtype=torch.double)
    args = (scores, confusion, None, None, weight, *one_annotator(nnz), label, True)
    op_checks.check_values(emulated.op("softmax_link"), reference.softmax_link, args)


@pytest.mark.parametrize("labels", [3, 20, 40, 140])
def test_impossible_labels(emulated: Emulated, labels: int) -> None:
    problem = make_problem(6, 2, 3, labels, 4, seed=8)
    problem.shared[:, 1:] = -torch.inf
    args = (
        problem.scores,
        problem.confusion,
        problem.shared,
        None,
        None,
        *problem.index,
        problem.annotations.label,
        False,
    )
    _, nll, probs = emulated.op("softmax_link")(*args)
    wanted = reference.softmax_link(*args)
    assert_close(nll, wanted[1])
    assert_close(probs, wanted[2])


@pytest.mark.parametrize("position", [3, 4])
def test_indices_out_of_range_are_refused(emulated: Emulated, position: int) -> None:
    problem: Problem = make_problem(6, 4, 3, 3, 4, seed=2)
    args = list(arguments(problem, "mix")[0])
    args[position] = args[position] + 10
    with pytest.raises(RuntimeError, match="assertion failed"):
        emulated.op("mix")(*args)


@pytest.mark.parametrize(
    ("position", "change", "message"),
    [
        (0, lambda t: t[:-1], "scores has the wrong shape"),
        (1, lambda t: t[:-1], "grad has the wrong shape"),
        (1, lambda t: t.float(), "grad must have the dtype"),
        (2, lambda t: t[0], "indptr must have shape|dimension"),
        (4, lambda t: t.int(), "annotator must be int64"),
        (5, lambda t: t[1:], "order must have shape"),
    ],
)
def test_launchers_refuse_wrong_arguments(emulated: Emulated, position: int, change: Any, message: str) -> None:
    args = list(arguments(make_problem(6, 4, 3, 3, 4, seed=2), "mix_annotators")[0])
    args[position] = change(args[position])
    with pytest.raises((RuntimeError, IndexError), match=message):
        emulated.op("mix_annotators")(*args)


def test_launchers_take_any_layout_and_refuse_scores_in_half_precision(emulated: Emulated) -> None:
    for name in NAMES:
        for args in arguments(make_problem(6, 4, 3, 5, 4, seed=2), name):
            op_checks.check_layouts(emulated.op(name), args)
    args = arguments(make_problem(6, 4, 3, 3, 4, seed=2), "mix_annotators")[0]
    half = tuple(a.half() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
    with pytest.raises(RuntimeError, match="scores must have the dtype|float32 or float64"):
        emulated.op("mix_annotators")(*half)
