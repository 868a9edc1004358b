"""Matrices in float16 and bfloat16 on a GPU: read as they are stored, summed in float32."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_close, assert_same
from support.cuda import DEVICE, SIZES, on_device, ops, spread, to_device
from support.halves import DTYPES, READERS, check_every_number, check_half, half_problem, halved
from support.op_arguments import of_every_kind
from support.op_checks import as_tuple, leaf
from support.problems import make_problem

import crowdnal.functional as F

pytestmark = pytest.mark.cuda
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
LOSSES = (F.crowd_cross_entropy, F.crowd_mixture_nll, F.crowd_marginal_nll)


@dtypes
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", READERS)
def test_ops_compute_in_single(name: str, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    for args in of_every_kind(half_problem(sizes, dtype), name):
        check_half(on_device(name), name, args, dtype, exact=False)


@dtypes
@pytest.mark.parametrize("sizes", SIZES[1:4], ids=str)
@pytest.mark.parametrize("name", READERS)
def test_bitwise_equal_over_runs_and_layouts(name: str, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    for args in of_every_kind(half_problem(sizes, dtype), name):
        given = to_device(halved(name, args, dtype))
        first = as_tuple(getattr(ops, name)(*given))
        for again in (given, tuple(spread(a) for a in given)):
            assert_same(as_tuple(getattr(ops, name)(*again)), first, "output")


@dtypes
def test_every_number_is_read_as_it_is(dtype: torch.dtype) -> None:
    check_every_number(lambda *args: on_device("label_log_likelihood")(*args)[0], dtype)
    table, chosen = torch.randn(7, 5, 9).to(dtype), torch.tensor([6, 0, 0, 3])
    assert_same(on_device("select")(table, chosen)[0], table[chosen])


@dtypes
def test_no_copy_of_the_matrices_is_made(dtype: torch.dtype) -> None:
    a = make_problem(64, 200_000, 10, 10, 6, seed=3).annotations.prepare().to(DEVICE)
    scores, confusion = torch.randn(64, 10, device=DEVICE), torch.randn(200_000, 10, 10, device=DEVICE).to(dtype)
    for loss in LOSSES:
        for autocast in (False, True):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                loss(scores.log_softmax(1), confusion, a)
            assert torch.cuda.max_memory_allocated() - before < confusion.numel()  # half of what the matrices take


@dtypes
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_have_the_dtype_of_their_leaf(sparse: bool, dtype: torch.dtype) -> None:
    p = make_problem(64, 9, 8, 8, 6, seed=3)
    a, scores = p.annotations.to(DEVICE), p.scores.float().to(DEVICE)
    for loss in LOSSES[: 2 if sparse else 3]:
        options = {"sparse_grad": True} if sparse else {}
        low, high = (leaf(p.confusion.to(DEVICE, dtype).to(kind)) for kind in (dtype, torch.float32))
        for w in (low, high):
            loss(scores.log_softmax(1), w, a, **options).backward()  # type: ignore[arg-type]
        assert low.grad is not None and high.grad is not None and low.grad.dtype == dtype
        eps = torch.finfo(dtype).eps
        assert_close(low.grad.to_dense(), high.grad.to_dense().to(dtype), rtol=2 * eps, atol=1e-6)


@dtypes
def test_opcheck(dtype: torch.dtype) -> None:
    for name in READERS:
        for args in of_every_kind(half_problem((5, 4, 3, 3, 3), dtype), name):
            given = to_device(halved(name, args, dtype))
            torch.library.opcheck(getattr(ops, name).default, given, test_utils=("test_schema", "test_faketensor"))
