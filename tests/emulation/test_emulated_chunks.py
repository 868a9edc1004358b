"""How the kernels of CUDA part sums over annotators, on the emulator."""

from __future__ import annotations

import subprocess
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from support import op_checks
from support.emulated import Emulated, program
from support.emulated_checks import check_bitwise

from crowdnal import reference

pytestmark = pytest.mark.slow  # the kernels of CUDA are compiled for it


@pytest.fixture(scope="module")
def chunks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program("chunks", tmp_path_factory.mktemp("chunks"))


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program("matrices", tmp_path_factory.mktemp("matrices"))


def by_the_book(size: int, counts: list[int]) -> list[tuple[int, int, int]]:
    """Cut at annotators' starts where an annotator ends inside a chunk; slots where none does."""
    ends = list(accumulate(counts))
    nnz = ends[-1] if ends else 0
    cuts, slots = [], []
    for p in range(0, nnz, size):
        r = next(r for r, end in enumerate(ends) if p < end)
        inside, covers = ends[r] - counts[r] < p, ends[r] >= min(p + size, nnz)
        cuts.append(ends[r] if inside and not covers else p)
        slots.append(r if inside and covers else None)
    cuts.append(nnz)
    found = [
        slots.count(r) if r is not None and r not in slots[:q] else 0 - (r is not None) for q, r in enumerate(slots)
    ]
    return list(zip(cuts, cuts[1:], found, strict=False))


@pytest.mark.parametrize(
    ("size", "counts"),
    [
        (4, []),
        (4, [3]),
        (4, [4, 4, 4]),
        (4, [0, 5, 0, 6, 1, 0]),
        (4, [2, 3, 2, 3, 1, 1, 1, 1, 5]),
        (4, [1, 40, 1]),
        (4, [40]),
        (4, [6, 6, 30, 3, 9, 12]),
        (1, [3, 1, 2]),
        (7, [5] * 30),
        (3, [500, 1, 700]),
    ],
    ids=str,
)
def test_where_they_are_cut(chunks: Path, size: int, counts: list[int]) -> None:
    done = subprocess.run([chunks, str(size), *map(str, counts)], capture_output=True, text=True, check=True)
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert found == by_the_book(size, counts)
    if counts and max(counts) < size:
        assert not any(slots for *_, slots in found[:-1])


@pytest.mark.parametrize(
    "counts",
    [[1], [8] * 40, [25] * 11, [0, 16, 3, 0, 17, 1, 40, 0], [100, 1, 1, 1, 1, 1, 300], [1] * 50, [500]],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(33, 130), (140, 8)], ids=str)
def test_large_matrices_are_read_once_for_sixteen_annotations(
    matrices: Path, sizes: tuple[int, int], counts: list[int]
) -> None:
    done = subprocess.run([matrices, *map(str, (*sizes, *counts))], capture_output=True, text=True, check=True)
    passes = sum(-(-count // 16) for count in counts)
    assert done.stdout.split() == ["right", str(passes), str(passes)]


@pytest.mark.parametrize(("rows", "cols"), [(3, 5), (17, 40), (50, 47), (45, 4), (88, 16), (89, 16)], ids=str)
@pytest.mark.parametrize(
    "counts", [[700], [0, 300, 1, 0, 2, 330, 31], [9] * 60, [40, 0, 33, 70, 1, 200]], ids=["one", "few", "many", "some"]
)
def test_sums_over_annotators_of_any_length(emulated: Emulated, counts: list[int], rows: int, cols: int) -> None:
    """Few slots and many, of matrices in one tile and in several, and that just fit where they are summed or do not."""
    generator = torch.Generator().manual_seed(7)
    annotator = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    nnz = len(annotator)
    annotator = annotator[torch.randperm(nnz, generator=generator)]
    index = (torch.arange(nnz + 1), torch.arange(nnz), annotator, torch.argsort(annotator, stable=True), None)
    scores, grad = (torch.randn(nnz, n, dtype=torch.double, generator=generator) for n in (rows, cols))
    args = (scores, grad, *index, len(counts))
    op_checks.check_values(emulated.op("mix_annotators"), reference.mix_annotators, args)
    check_bitwise(emulated, "mix_annotators", op_checks.to_float(args))
    label = torch.randint(rows, (nnz,), generator=generator)
    args = (grad, None, *index, label, len(counts), rows)
    op_checks.check_values(emulated.op("label_counts"), reference.label_counts, args)
    check_bitwise(emulated, "label_counts", op_checks.to_float(args))
