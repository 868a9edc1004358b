"""Random problems for the tests: sizes drawn by hypothesis, values by a seeded generator."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from crowdnal.data import Annotations


@dataclass
class Problem:
    annotations: Annotations
    scores: Tensor  # [B, C]
    confusion: Tensor  # [R, C, K]
    shared: Tensor  # [B, K]
    weight: Tensor  # [nnz]
    seed: int

    def __repr__(self) -> str:
        a, (_, classes, labels) = self.annotations, self.confusion.shape
        sizes = f"B={a.num_items}, R={a.num_annotators}, C={classes}, K={labels}, nnz={a.num_annotations}"
        return f"Problem({sizes}, seed={self.seed})"

    @property
    def index(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        a = self.annotations
        return a.indptr, a.item, a.annotator, a.order, a.plan

    @property
    def stored(self) -> Tensor:
        """A confusion with the observed label outermost, [R, K, C]."""
        return self.confusion.transpose(1, 2).contiguous()

    @property
    def mixing(self) -> Tensor:
        """[nnz] in 0..1."""
        return self.grad(1).squeeze(1).sigmoid()

    def prior(self, stored: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Of the matrices' rows: pseudo-counts and what is common, [C, K] (or [K, C] for those of `stored`), one of
        the former 0; the labels that were given, [R], 0 to 5."""
        num_annotators, *sizes = self.confusion.shape
        counts, common = torch.arange(2 * math.prod(sizes), dtype=torch.double).add(self.seed).sin().view(2, *sizes)
        counts = (1 + counts) * (torch.arange(counts.numel()) != counts.numel() - sizes[1]).view(sizes)
        labels_given = (torch.arange(num_annotators) % 6).double()
        return (counts.t(), common.t(), labels_given) if stored else (counts, common, labels_given)

    def grad(self, cols: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.annotations.num_annotations, cols, dtype=torch.double, generator=generator)


def make_problem(
    num_items: int,
    num_annotators: int,
    classes: int,
    labels: int,
    per_item: int,
    seed: int,
    scale: float = 1.0,
) -> Problem:
    """Ragged: 0 to `per_item` annotations an item, repeated pairs allowed."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, per_item + 1, (num_items,), generator=generator)
    nnz = int(counts.sum())
    annotations = Annotations(
        torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]),
        torch.randint(num_annotators, (nnz,), generator=generator),
        torch.randint(labels, (nnz,), generator=generator),
        num_annotators=num_annotators,
        num_classes=labels,
    )

    def randn(*sizes: int) -> Tensor:
        return scale * torch.randn(*sizes, dtype=torch.double, generator=generator)

    return Problem(
        annotations,
        randn(num_items, classes),
        randn(num_annotators, classes, labels),
        randn(num_items, labels),
        torch.rand(nnz, dtype=torch.double, generator=generator),
        seed,
    )


@st.composite
def problems(draw: st.DrawFn, max_matrices: int = 200_000) -> Problem:
    """C and K from 1 to 200, R from 1 to 5000 (fewer where the matrices would not fit in the time of a test)."""
    classes = draw(st.integers(1, 40) | st.integers(1, 200))
    labels = draw(st.just(classes) | st.integers(1, 200))
    num_annotators = draw(st.integers(1, max(1, min(5000, max_matrices // (classes * labels)))))
    num_items = draw(st.integers(0, 12))
    per_item = draw(st.integers(0, 8))
    return make_problem(num_items, num_annotators, classes, labels, per_item, draw(st.integers(0, 2**31)))
