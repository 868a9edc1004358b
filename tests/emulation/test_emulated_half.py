"""The CUDA kernels on matrices in half precision, on the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import op_arguments
from support.compare import assert_same
from support.emulated import Emulated
from support.emulated_checks import check_bitwise
from support.halves import DTYPES, READERS, check_every_number, check_half, half_problem, halved
from support.op_arguments import of_every_kind
from support.pairs import make_pairs
from support.problems import make_problem

pytestmark = pytest.mark.slow  # the kernels of CUDA are compiled for it

# (B, R, C, K, annotations an item): every tier and width of an access, few and many annotations of an annotator
SIZES = [
    (0, 3, 2, 2, 1),
    (20, 3, 8, 8, 6),
    (9, 40, 9, 6, 6),
    (4, 3, 16, 17, 6),
    (4, 3, 10, 12, 9),
    (3, 3, 20, 18, 7),
    (3, 3, 28, 32, 7),
    (3, 2, 3, 44, 6),
    (3, 2, 2, 97, 6),
    (2, 2, 33, 66, 6),
    (2, 1, 130, 129, 9),
]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def arguments(name: str, sizes: tuple[int, ...], dtype: torch.dtype) -> list[tuple[Any, ...]]:
    problem = half_problem(sizes, dtype)
    return [] if "pair" in name and sizes[2] * sizes[3] >= 400 else of_every_kind(problem, name)


@dtypes
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", READERS)
def test_half_precision_is_read_and_summed_in_single(
    emulated: Emulated, name: str, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    for args in arguments(name, sizes, dtype):
        check_half(emulated.op(name), name, args, dtype, exact=True)


@dtypes
@pytest.mark.parametrize("name", READERS)
def test_the_same_bits_in_every_order(emulated: Emulated, name: str, dtype: torch.dtype) -> None:
    check_bitwise(emulated, name, halved(name, arguments(name, (9, 3, 10, 12, 9), dtype)[-1], dtype))


@dtypes
def test_every_number_is_read_as_it_is(emulated: Emulated, dtype: torch.dtype) -> None:
    check_every_number(emulated.op("label_log_likelihood"), dtype)


@dtypes
def test_select_keeps_the_dtype(emulated: Emulated, dtype: torch.dtype) -> None:
    confusion = torch.randn(7, 5, 9).to(dtype)
    chosen = torch.tensor([6, 0, 0, 3])
    assert_same(emulated.op("select")(confusion, chosen), confusion[chosen])


@dtypes
def test_matrices_at_odd_addresses(emulated: Emulated, dtype: torch.dtype) -> None:
    """The same bits, and no access wider than what the address allows."""
    problem = make_problem(9, 3, 8, 8, 6, seed=5)
    scores, confusion, *index = halved("mix", op_arguments.arguments(problem, "mix")[0], dtype)
    for shift in (1, 2, 3):
        memory = confusion.new_zeros(confusion.numel() + 4)
        moved = memory[shift : shift + confusion.numel()].view(confusion.shape).copy_(confusion)
        assert moved.is_contiguous() and moved.data_ptr() % 8 == 2 * shift
        args = (scores, moved, *index)
        check_half(emulated.op("mix"), "mix", args, dtype, exact=False)
        assert_same(emulated.op("mix")(*args), emulated.op("mix")(scores, confusion, *index))


def test_all_else_must_be_single(emulated: Emulated) -> None:
    args = list(halved("mix", op_arguments.arguments(make_problem(6, 4, 3, 3, 4, seed=2), "mix")[0], torch.float16))
    args[0] = args[0].half()
    with pytest.raises(RuntimeError, match="scores must have the dtype of the matrices .float32 beside float16"):
        emulated.op("mix")(*args)
    difficulty, *rest = make_pairs(make_problem(6, 4, 3, 3, 4, seed=2), 2).arguments("pair_confusion")[0]
    with pytest.raises(RuntimeError, match="difficulty must have the dtype"):
        emulated.op("pair_confusion")(difficulty.float(), rest[0].bfloat16(), *rest[1:])
