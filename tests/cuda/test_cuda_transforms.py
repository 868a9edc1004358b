"""On a GPU: derivatives under torch.func, values at the edge of float32, and the memory of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import transform_checks
from support.compare import assert_close
from support.cuda import DEVICE, on_device, to_device
from support.op_arguments import PAIRS
from support.op_checks import check_float_error, check_huge_values
from support.pairs import make_pairs
from support.problems import Problem, make_problem
from torch import Tensor

import crowdnal.functional as F
from crowdnal import reference

pytestmark = pytest.mark.cuda
each_loss = pytest.mark.parametrize("which", [0, 1])


def moved(p: Problem) -> Problem:
    scores, confusion, shared, weight = to_device((p.scores, p.confusion, p.shared, p.weight))
    return replace(
        p, annotations=p.annotations.to(DEVICE), scores=scores, confusion=confusion, shared=shared, weight=weight
    )


@pytest.fixture
def problem() -> Problem:
    return moved(make_problem(5, 4, 4, 3, 3, seed=5))


@each_loss
def test_functorch_transforms_agree_with_autograd(problem: Problem, which: int) -> None:
    transform_checks.check_against_autograd(problem, which)


@each_loss
@pytest.mark.parametrize("in_dims", [(0, None), (None, 2), (1, 0)])
def test_vmap_equals_a_loop(problem: Problem, which: int, in_dims: tuple[int | None, int | None]) -> None:
    transform_checks.check_vmap(problem, which, in_dims)


def test_raw_ops_are_never_silent_in_forward_mode(problem: Problem) -> None:
    transform_checks.check_raw_ops_in_forward_mode(problem)


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_at_the_edge_of_single_precision(name: str) -> None:
    check_huge_values(on_device(name), name)
    for scale in (1.0, 40.0, 300.0):
        for args in make_pairs(make_problem(12, 5, 7, 6, 4, seed=9), 3, scale).arguments(name):
            check_float_error(on_device(name), getattr(reference, name), args)


@pytest.mark.parametrize("labels", [3, 20, 40, 140])
def test_impossible_labels(labels: int) -> None:
    p = make_problem(6, 2, 3, labels, 4, seed=8)
    p.shared[:, 1:] = -torch.inf
    args = (p.scores, p.confusion, p.shared, None, None, *p.index, p.annotations.label, False)
    ours = on_device("softmax_link")(*args)
    assert_close(list(ours[1:]), list(reference.softmax_link(*args)[1:]), where="nll, probs")


def most_bytes(loss: Tensor, before: int) -> int:
    loss.backward()
    return torch.cuda.max_memory_allocated() - before


def test_nothing_of_size_annotations_times_matrix_is_allocated() -> None:
    p = moved(make_problem(2000, 2, 64, 64, 5, seed=0))  # about 5,000 annotations: 82 MB if matrices were gathered
    leaves = [t.float().requires_grad_() for t in (p.scores, p.confusion)]
    before, rows = torch.cuda.memory_allocated(), 4 * p.annotations.num_annotations * 64
    torch.cuda.reset_peak_memory_stats()
    assert 0 < most_bytes(F.crowd_cross_entropy(*leaves, p.annotations), before) < 12 * rows
    case = make_pairs(make_problem(40, 30, 16, 16, 200, seed=0), 4)  # gathered, about 4,000 tensors of 4 kB
    annotations = case.annotations.to(DEVICE)
    leaves = [t.to(DEVICE).float().requires_grad_() for t in (case.difficulty, case.competence)]
    before, gathered = torch.cuda.memory_allocated(), 4 * annotations.num_annotations * 16 * 16 * 4
    torch.cuda.reset_peak_memory_stats()
    assert 0 < most_bytes(F.pair_confusion(*leaves, annotations).sum(), before) < gathered / 3
