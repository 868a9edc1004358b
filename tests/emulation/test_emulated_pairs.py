"""The CUDA kernels of the pair confusion, on the emulator, against the reference."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support import op_checks
from support.compare import assert_close, assert_same, assert_within
from support.emulated import Emulated, program
from support.emulated_checks import check, check_bitwise
from support.halves import DTYPES, check_half, half_problem
from support.long_segments import WHERE, long_problem
from support.pairs import NAMES, Pairs, impossible, make_pairs
from support.problems import make_problem

from crowdnal import reference

pytestmark = pytest.mark.slow  # the kernels of CUDA are compiled for it

# (B, R, C, K, annotations an item) and latents: no items, no annotations, every width of an access, rows that fill a
# group and rows that one walks along, more and fewer annotators than annotations, groups that keep an item and not
CASES = [
    ((0, 2, 2, 2, 1), 1),
    ((3, 2, 2, 2, 0), 4),
    ((1, 1, 1, 1, 1), 1),
    ((9, 4, 3, 3, 6), 4),
    ((9, 40, 10, 10, 3), 4),
    ((7, 3, 2, 8, 5), 4),
    ((5, 3, 2, 9, 5), 4),
    ((6, 3, 4, 12, 40), 4),
    ((3, 2, 3, 13, 7), 4),
    ((4, 20, 2, 24, 4), 4),
    ((3, 5, 3, 25, 6), 4),
    ((2, 2, 2, 30, 70), 16),
    ((9, 4, 5, 7, 6), 3),
    ((3, 2, 3, 32, 40), 1),
    ((4, 9, 2, 67, 3), 2),
    ((2, 2, 3, 50, 9), 5),
    # wide rows of items and annotators without annotations
    ((3, 2, 2, 40, 0), 4),
    ((0, 2, 2, 40, 1), 4),
    ((2, 30, 2, 150, 2), 4),
]


def by_hand(annotator: list[int], label: list[int], item: list[int], case: Pairs) -> tuple[Any, ...]:
    """Arguments of the forward op of a few annotations, which lie together by item."""
    who, items = torch.tensor(annotator), torch.tensor(item)
    indptr = torch.searchsorted(items, torch.arange(case.difficulty.shape[0] + 1))
    order = torch.argsort(who, stable=True)
    return case.difficulty, case.competence, indptr, items, who, order, None, torch.tensor(label)


def backward(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    outputs = reference.pair_confusion(*inputs)
    grad = torch.linspace(-2, 3, outputs[0].numel(), dtype=torch.double).reshape(outputs[0].shape)
    return (grad, *inputs, *outputs, True, True)


def both(emulated: Emulated, inputs: tuple[Any, ...], tolerance: float = 1e-5) -> list[torch.Tensor]:
    """Both ops in double and in single precision; returns the outputs in single."""
    outs = []
    for name, args in zip(NAMES, (inputs, backward(inputs)), strict=True):
        op_checks.check_values(emulated.op(name), getattr(reference, name), args)
        check_bitwise(emulated, name, op_checks.to_float(args))
        op_checks.check_single(emulated.op(name), getattr(reference, name), args, tolerance)
        outs += emulated.op(name)(*op_checks.to_float(args))
    return outs


def coarse(case: Pairs) -> None:
    """Numbers that float32 adds without an error."""
    for values in (case.difficulty, case.competence):
        values.mul_(64).round_().div_(64)


@pytest.mark.parametrize(("sizes", "latents"), CASES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_equals_the_reference(emulated: Emulated, sizes: tuple[int, ...], latents: int, scale: float) -> None:
    case = make_pairs(make_problem(*sizes, seed=9), latents, scale)
    for name in NAMES:
        for args in case.arguments(name):
            check(emulated, name, args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "latents"), [((9, 40, 9, 9, 3), 4), ((4, 3, 3, 33, 9), 4)], ids=str)
def test_half_precision_in_vectors(
    emulated: Emulated, sizes: tuple[int, ...], latents: int, dtype: torch.dtype
) -> None:
    case = make_pairs(half_problem(sizes, dtype), latents)
    case.difficulty, case.competence = (t.to(dtype).double() for t in (case.difficulty, case.competence))
    for name in NAMES:
        check_half(emulated.op(name), name, case.arguments(name)[0], dtype, exact=True)


def test_tensors_at_odd_addresses(emulated: Emulated) -> None:
    """Give the same bits, whichever of them begin there."""
    case = make_pairs(make_problem(9, 4, 3, 5, 6, seed=2), 4)
    for name, inputs in zip(NAMES, (case.inputs, case.backward_inputs((True, True))), strict=True):
        usual = op_checks.to_float(inputs)
        for shifted in ((0,), (1,), range(len(usual))):
            moved = [op_checks.at_odd_address(a) if at in shifted else a for at, a in enumerate(usual)]
            assert_same(emulated.op(name)(*moved), emulated.op(name)(*usual), "output")


@pytest.mark.parametrize(("labels", "latents"), [(3, 4), (110, 4), (45, 3)])
def test_exact_and_other_classes_of_an_annotation(emulated: Emulated, labels: int, latents: int) -> None:
    """What was observed is all but impossible in class 1, and in class 2 of one annotator."""
    case = make_pairs(make_problem(3, 2, 4, labels, 0, seed=1), latents)
    coarse(case)
    case.difficulty[:, 1, 0] -= 70
    case.competence[0, 2, 0] -= 300
    inputs = by_hand([0, 1, 0, 1, 1], [0, 0, 1, 0, labels - 1], [0, 0, 1, 2, 2], case)
    log_q, *_ = both(emulated, inputs, 3e-6)
    small = log_q < -46
    assert small[:2].tolist() == [[False, True, True, False], [False, True, False, False]] and not small[2].any()
    assert small.sum() == 4  # and class 1 of annotation 3


@pytest.mark.parametrize("latents", [3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_huge_values(emulated: Emulated, name: str, latents: int) -> None:
    op_checks.check_huge_values(emulated.op(name), name, latents)


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program("pairs", tmp_path_factory.mktemp("pairs"), flags=["-O1"])


@pytest.mark.parametrize("part", ["together", "chunks", "reads"])
def test_how_the_work_is_cut_does_not_matter(cuts: Path, part: str) -> None:
    """Nor how wide a row is: it is read once for its maximum and once for its terms."""
    done = subprocess.run([cuts, part], capture_output=True, text=True)
    assert done.stdout == "right\n"


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("latents", "exact"), [(4, False), (3, False), (4, True)])
def test_a_long_segment_loses_no_accuracy(emulated: Emulated, where: str, latents: int, exact: bool) -> None:
    problem = long_problem(where, 2, 3, 600 if exact else 4_000)
    case = make_pairs(problem, latents, 0.5)
    coarse(case)
    if exact:
        problem.annotations.label.zero_()
        case.difficulty[:, :, 0] -= 64
    for name in NAMES:
        args = case.arguments(name)[0]
        outs = zip(emulated.op(name)(*op_checks.to_float(args)), getattr(reference, name)(*args), strict=True)
        for n, (ours, truth) in enumerate(outs):  # kept outputs are not rounded first
            assert_within(ours, truth, 2e-6 * truth.abs().max(), f"output {n}")


@pytest.mark.parametrize("num_annotators", [4, 50])  # fewer and more than annotations
def test_who_is_absent_costs_no_gradient(emulated: Emulated, num_annotators: int) -> None:
    """Annotators in front, between and behind, and items, whose numbers nobody may look at."""
    case = make_pairs(make_problem(5, num_annotators, 3, 3, 0, seed=3), 4)
    inputs = by_hand([2, 1, 2, 1, 2, 2], [0, 2, 1, 1, 0, 0], [1, 1, 1, 3, 3, 3], case)
    both(emulated, inputs)
    absent = [r for r in range(num_annotators) if r not in (1, 2)]
    clean = emulated.op(NAMES[1])(*backward(inputs))
    saved = backward(inputs)
    case.competence[absent] = case.difficulty[[0, 2, 4]] = torch.nan
    grads = emulated.op(NAMES[1])(saved[0], case.difficulty, case.competence, *saved[3:])
    assert_same(grads, clean, "gradient")
    assert not grads[0][[0, 2, 4]].any() and not grads[1][absent].any()


@pytest.mark.parametrize("latents", [2, 4])
def test_impossible_pairs(emulated: Emulated, latents: int) -> None:
    case = impossible()
    if latents == 4:
        repeat = (1, 1, 1, 2)
        case.difficulty, case.competence = case.difficulty.repeat(repeat), case.competence.repeat(repeat)
    case.difficulty[2, 1] = case.competence[1, 2] = -torch.inf  # classes in which nothing is possible
    log_q, _, *grads = both(emulated, case.inputs)
    assert (log_q == -torch.inf).any() and all(g.isfinite().all() for g in grads)


def test_nan_stays(emulated: Emulated) -> None:
    case = make_pairs(make_problem(4, 3, 2, 3, 3, seed=4), 4)
    case.difficulty[1, 0, 1, 2] = torch.nan
    (log_q, _), (wanted, _) = emulated.op(NAMES[0])(*case.inputs), reference.pair_confusion(*case.inputs)
    assert wanted.isnan().any()
    assert_close(log_q, wanted, equal_nan=True, rtol=1e-9, atol=1e-9)


def test_gradients_of_one_side_alone(emulated: Emulated) -> None:
    case = make_pairs(make_problem(6, 3, 4, 5, 7, seed=6), 4, 40.0)
    whole, *parts = (emulated.op(NAMES[1])(*args) for args in case.arguments(NAMES[1]))
    assert torch.equal(whole[0], parts[0][0]) and parts[0][1].shape[0] == 0
    assert torch.equal(whole[1], parts[1][1]) and parts[1][0].shape[0] == 0
