"""The one pass of the softmax link on CUDA, on the emulator, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import assert_close
from support.emulated import Emulated
from support.emulated_checks import check
from support.halves import check_half
from support.op_arguments import of_every_kind
from support.problems import make_problem

from crowdnal import reference
from crowdnal.data import Annotations

pytestmark = pytest.mark.slow  # the kernels of CUDA are compiled for it

STEP = "softmax_link_step"
SIZES = [(1, 1), (2, 2), (3, 3), (8, 8), (10, 10), (16, 16), (30, 30), (32, 32), (3, 9), (17, 2), (33, 4)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_step_equals_reference(emulated: Emulated, sizes: tuple[int, int]) -> None:
    """Annotators of a few annotations, of many, and without."""
    for items, annotators, per_item in ((9, 40, 3), (24, 2, 9), (1, 5, 2)):
        for args in of_every_kind(make_problem(items, annotators, *sizes, per_item, seed=4), STEP):
            check(emulated, STEP, args)


@pytest.mark.parametrize("nnz", [0, 1, 31, 33])
def test_one_annotator(emulated: Emulated, nnz: int) -> None:
    a = Annotations(
        torch.arange(nnz + 1), torch.full((nnz,), 2), torch.arange(nnz) % 3, num_annotators=4, num_classes=3
    )
    index = a.indptr, a.item, a.annotator, a.order, a.plan, a.label
    scores = torch.linspace(-2, 2, 3 * nnz, dtype=torch.double).reshape(nnz, 3)
    confusion = torch.linspace(-1, 1, 36, dtype=torch.double).reshape(4, 3, 3)
    check(emulated, STEP, (scores, confusion, None, None, None, *index, *(None,) * 3, True, True, True, False, False))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_matrices(emulated: Emulated, dtype: torch.dtype) -> None:
    for sizes in ((8, 8), (10, 10), (30, 30)):
        for args in of_every_kind(make_problem(20, 3, *sizes, 6, seed=5), STEP):
            check_half(emulated.op(STEP), STEP, args, dtype, exact=False)


def test_scores_without_an_end(emulated: Emulated) -> None:
    """Classes that are impossible, and all of them."""
    p = make_problem(6, 2, 3, 3, 4, seed=6)
    shared = torch.zeros(6, 3, dtype=torch.double)
    shared[:, 0], shared[5] = -torch.inf, -torch.inf
    rest = (*p.index, p.annotations.label, *(None,) * 3, False, True, True, True, False)
    out = emulated.op(STEP)(p.scores, p.confusion, shared, None, None, *rest)
    wanted = reference.softmax_link_step(p.scores, p.confusion, shared, None, None, *rest)
    assert_close(out[1], wanted[1], equal_nan=True)
    assert wanted[1].isinf().any() and wanted[1].isnan().any() and wanted[1].isfinite().any()


def long_annotators(nnz: int, classes: int) -> tuple[Any, ...]:
    """One who begins inside the first chunk and has most of the others, between short ones."""
    annotator = torch.cat([torch.zeros(17), torch.ones(nnz - 40), torch.arange(2, 25)]).long()
    a = Annotations(
        torch.arange(nnz + 1), annotator, torch.arange(nnz) % classes, num_annotators=26, num_classes=classes
    )
    return a.indptr, a.item, a.annotator, a.order, a.plan, a.label


def test_long_annotators_lose_no_accuracy(emulated: Emulated) -> None:
    nnz, classes = 200_000, 3
    index = long_annotators(nnz, classes)
    scores = torch.rand(nnz, classes, generator=torch.Generator().manual_seed(0))
    confusion = torch.eye(classes).repeat(26, 1, 1)
    rest = (None, None, None, *index, None, None, None, False, True, True, False, False)
    wanted = reference.softmax_link_step(scores.double(), confusion.double(), *rest)
    out = emulated.op(STEP)(scores, confusion, *rest)
    for found, exact in zip(out[:4], wanted, strict=False):
        assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    assert not out[3][25].any()
