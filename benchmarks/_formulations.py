"""What `kernels.py` times: the grid of cells, and the table of ops with every formulation of each.

A further op is one more `Op` in the list of one of the other files: its leaves, our call, the other formulations, the
work that it needs.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import crowdnal


@dataclass(frozen=True)
class Cell:
    name: str
    items: int
    annotators: int
    classes: int
    per_item: float


GRID = [
    Cell("labelme", 128, 59, 8, 2.5),
    Cell("music", 128, 44, 10, 4.2),
    Cell("ccc", 128, 250, 10, 3),
    Cell("cifar10n", 1024, 747, 10, 3),
    Cell("medical", 1024, 466, 14, 15),
    Cell("cmm", 1024, 10_000, 10, 3),
    Cell("cifar100", 256, 519, 100, 5),
    Cell("imagenet", 256, 100, 1000, 3),
    Cell("millions", 1024, 1_000_000, 10, 3),
]
THOUSAND = Cell("thousand", 1024, 1000, 10, 3)  # what sparse gradients in the cell "millions" are compared with
TINY = Cell("tiny", 16, 5, 3, 2)  # for tests


class Problem:
    """The annotations of a cell (distinct annotators on an item, all equally likely) and an op's leaves on them."""

    def __init__(self, cell: Cell, leaves: Callable[[Problem], Sequence[Tensor]], dtype: torch.dtype) -> None:
        self.cell, self.dtype = cell, dtype
        self.B, self.R, self.C = cell.items, cell.annotators, cell.classes
        self.nnz = round(cell.items * cell.per_item)
        chooser = random.Random(0)
        more = set(chooser.sample(range(self.B), self.nnz % self.B))
        who = [chooser.sample(range(self.R), self.nnz // self.B + (i in more)) for i in range(self.B)]
        self.generator = torch.Generator().manual_seed(0)
        self.annotations = crowdnal.Annotations(
            torch.tensor([0, *map(len, who)]).cumsum(0),
            torch.tensor([r for row in who for r in row]),
            torch.randint(self.C, (self.nnz,), generator=self.generator),
            num_annotators=self.R,
            num_classes=self.C,
        ).prepare()  # as crowdnal.collate does in a DataLoader's worker
        self.active = self.annotations.annotator.unique().numel()
        self.leaves = [leaf.requires_grad_() for leaf in leaves(self)]

    def normal(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=self.dtype, generator=self.generator)

    @cached_property
    def index(self) -> tuple[Tensor, Tensor, Tensor]:
        """(item, annotator, label), without the marks that make torch.compile treat nnz as dynamic."""
        a = self.annotations
        return a.item.clone(), a.annotator.clone(), a.label.clone()

    @cached_property
    def dense(self) -> Tensor:
        """Targets [B, R], -1 where there is none."""
        return self.annotations.to_dense()


@dataclass
class Candidate:
    """`function(*arguments)`, then backward to `leaves`; `canonical` turns their gradients into those of our leaves."""

    function: Callable[..., Tensor]
    arguments: Sequence[Any]
    leaves: Sequence[Tensor]
    canonical: Callable[[list[Tensor]], list[Tensor]] = list

    def __call__(self) -> Tensor:
        for leaf in self.leaves:
            leaf.grad = None
        output = self.function(*self.arguments)
        if self.leaves:
            output.backward()
        return output

    def results(self) -> list[Tensor]:
        output = self().detach()
        return [output, *self.canonical([leaf.grad for leaf in self.leaves])]


Multiples = tuple[float, float, float]
"""Of B x R x C, nnz x C x C and R x C x C numbers: how much memory a step takes beyond inputs and gradients."""


@dataclass(frozen=True)
class Formulation:
    """Another way to compute an op; it is not compiled where `compiled_memory` is None."""

    name: str
    build: Callable[[Problem], Candidate]
    memory: Multiples
    compiled_memory: Multiples | None = None

    def bytes(self, p: Problem, compiled: bool) -> float:
        """What a step is estimated to allocate, to keep what cannot fit from being tried."""
        multiples = self.compiled_memory if compiled else self.memory
        assert multiples is not None
        sizes = p.B * p.R * p.C, p.nnz * p.C**2, p.R * p.C**2
        return p.dtype.itemsize * sum(m * size for m, size in zip(multiples, sizes, strict=True))


@dataclass(frozen=True)
class Op:
    """`work` is (bytes, floating point operations) that one step needs however it is computed."""

    name: str
    leaves: Callable[[Problem], Sequence[Tensor]]
    ours: Callable[[Problem], Candidate]
    others: Sequence[Formulation]
    work: Callable[[Problem], tuple[float, float]]


def read_arguments(doc: str | None, what: str, names: list[str]) -> tuple[argparse.Namespace, list[str], list[Cell]]:
    """The options of a benchmark of some names in the cells of the grid: (all, which names, which cells)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cell, few turns")
    parser.add_argument(f"--{what}", dest="names", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--cells", default=",".join(cell.name for cell in GRID), help="of the grid; default all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write machine and rows here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    wanted, cells = arguments.names.split(","), arguments.cells.split(",")
    for given, known in ((wanted, names), (cells, [cell.name for cell in GRID])):
        if unknown := set(given) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return arguments, wanted, GRID[:1] if arguments.quick else [cell for cell in GRID if cell.name in cells]


def plain(function: Callable[..., Tensor], data: Callable[[Problem], Sequence[Any]]) -> Callable[[Problem], Candidate]:
    return lambda p: Candidate(function, (*p.leaves, *data(p)), p.leaves)


def traffic(p: Problem, sparse: bool = False) -> float:
    """Bytes both links need.

    Read by forward and again by backward: item rows, the matrices of annotators who are present, annotator, order,
    label and indptr (int64). Written: both gradients, dense in R unless `sparse`. Written, then read: C numbers an
    annotation.
    """
    matrices = 2 * p.active + (p.active if sparse else p.R)
    numbers = 3 * p.B * p.C + matrices * p.C**2 + 2 * p.nnz * p.C
    return numbers * p.dtype.itemsize + 2 * 8 * (3 * p.nnz + p.B + 1)
