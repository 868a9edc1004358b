"""What `kernels.py` times: the grid of cells, and the table of ops with every formulation of each.

A further op is one more entry of `OPS`: its leaves, our call, the other formulations, the work that it needs.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy, nll_loss, softplus

import crowdnal
from crowdnal.functional import crowd_cross_entropy, crowd_mixture_nll


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
        self.touched = self.annotations.annotator.unique().numel()
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


def plain(function: Callable[..., Tensor], data: Callable[[Problem], Sequence[Any]]) -> Callable[[Problem], Candidate]:
    return lambda p: Candidate(function, (*p.leaves, *data(p)), p.leaves)


# Softmax link


def softmax_leaves(p: Problem) -> list[Tensor]:
    return [p.normal(p.B, p.C).softmax(1), torch.eye(p.C, dtype=p.dtype) + 0.1 * p.normal(p.R, p.C, p.C)]


def softmax_dense(scores: Tensor, confusion: Tensor, targets: Tensor) -> Tensor:
    h = torch.einsum("bc,rck->brk", scores, confusion)
    return cross_entropy(h.flatten(0, 1), targets.flatten(), ignore_index=-1)


def softmax_gather(scores: Tensor, confusion: Tensor, item: Tensor, annotator: Tensor, label: Tensor) -> Tensor:
    # index_select: up to 4 times as fast as confusion[annotator], whose gradient is an index_put
    rows, matrices = scores.index_select(0, item), confusion.index_select(0, annotator)
    return cross_entropy(torch.bmm(rows.unsqueeze(1), matrices).squeeze(1), label)


def crowdkit_crowd_layer(p: Problem) -> Candidate:
    from crowdkit.learning import CrowdLayer

    scores, confusion = p.leaves
    layer = CrowdLayer(p.C, 1)  # sized by its weight, which is [R, observed, true]
    layer.weight = Parameter(confusion.detach().mT.contiguous())

    def function(item: Tensor, annotator: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(layer(scores.index_select(0, item), annotator), label)

    return Candidate(function, p.index, [scores, layer.weight], lambda g: [g[0], g[1].mT])


def softmax_work(p: Problem) -> tuple[float, float]:
    # Operations: a matrix-vector product an annotation forward and for each of two gradients; exp, sum, divide,
    # subtract for each of its scores. Bytes: see `traffic`, with K probabilities an annotation kept for the backward.
    return traffic(p), 6 * p.nnz * p.C**2 + 4 * p.nnz * p.C


def traffic(p: Problem) -> float:
    """Bytes both links need.

    Read by forward and again by backward: item rows, the matrices of annotators who are present, annotator, order,
    label and indptr (int64). Written: both gradients, dense in R. Written, then read: C numbers an annotation.
    """
    numbers = 3 * p.B * p.C + (2 * p.touched + p.R) * p.C**2 + 2 * p.nnz * p.C
    return numbers * p.dtype.itemsize + 2 * 8 * (3 * p.nnz + p.B + 1)


# Mixture link


def mixture_leaves(p: Problem) -> list[Tensor]:
    return [p.normal(p.B, p.C).log_softmax(1), 3 * torch.eye(p.C, dtype=p.dtype) + p.normal(p.R, p.C, p.C)]


def normalise(confusion: Tensor, kind: str) -> Tensor:
    """A [..., K, C] of stored values: sums to 1 over the observed label."""
    if kind == "softmax":
        return confusion.softmax(-2)
    positive = softplus(confusion)
    return positive / positive.sum(-2, keepdim=True)


def mixture_dense(log_probs: Tensor, confusion: Tensor, targets: Tensor, kind: str) -> Tensor:
    q = torch.einsum("bc,rkc->brk", log_probs.exp(), normalise(confusion, kind))
    seen = targets >= 0
    chosen = q.gather(2, targets.clamp(min=0).unsqueeze(2)).squeeze(2)
    return -torch.where(seen, chosen, 1.0).log().sum() / seen.sum()


def mixture_matrices(
    log_probs: Tensor, confusion: Tensor, item: Tensor, annotator: Tensor, label: Tensor, kind: str
) -> Tensor:
    matrices = normalise(confusion.index_select(0, annotator), kind)
    q = torch.bmm(log_probs.exp().index_select(0, item).unsqueeze(1), matrices.mT).squeeze(1)
    return nll_loss(q.log(), label)


def mixture_rows(
    log_probs: Tensor, confusion: Tensor, item: Tensor, annotator: Tensor, label: Tensor, kind: str
) -> Tensor:
    rows = normalise(confusion, kind).flatten(0, 1).index_select(0, annotator * confusion.shape[1] + label)
    return -(log_probs.exp().index_select(0, item) * rows).sum(1).log().mean()


def crowdkit_conal(p: Problem) -> Candidate:
    from crowdkit.learning import CoNAL

    class NoCommonConfusion(CoNAL):
        """With its common rate at 0 CoNAL is the mixture link."""

        def simple_common_module(self, input: Tensor, workers: Tensor) -> Tensor:
            return input.new_zeros(())

    log_probs, confusion = p.leaves
    with warnings.catch_warnings(action="ignore"):  # its LazyLinear, which stays unused
        layer = NoCommonConfusion(p.C, 1)
    layer.common_confusion_matrix.data = layer.common_confusion_matrix.data.to(p.dtype)
    layer.annotator_confusion_matrices = Parameter(confusion.detach().mT.contiguous())
    item, _, _ = p.index
    share = torch.bincount(item, minlength=p.B).unsqueeze(1) / p.nnz

    def function(item: Tensor, annotator: Tensor, label: Tensor) -> Tensor:
        rows = log_probs.index_select(0, item)
        return nll_loss(layer(rows, rows, annotator), label)

    def canonical(grads: list[Tensor]) -> list[Tensor]:
        # It normalises the log-probabilities once more, which takes from a row's gradient p times the row's sum.
        return [grads[0] - log_probs.detach().exp() * share, grads[1].mT]

    return Candidate(function, p.index, [log_probs, layer.annotator_confusion_matrices], canonical)


def mixture_work(p: Problem) -> tuple[float, float]:
    # Operations: a matrix element of an annotator who is present takes activation, exp, sum forward and exp, product,
    # difference, sum, activation' backward; an element of an annotation's row add, exp, sum, divide and 4 backward.
    # An exp or log counts as one, so this share is a lower bound. Bytes: see `traffic`.
    return traffic(p), 8 * p.touched * p.C**2 + 8 * p.nnz * p.C


def mixture_op(kind: Any) -> Op:
    def ours(p: Problem) -> Candidate:
        log_probs, confusion = p.leaves
        call = partial(crowd_mixture_nll, normalization=kind)
        return Candidate(call, (log_probs, confusion, p.annotations), p.leaves)

    dense = plain(mixture_dense, lambda p: (p.dense, kind))
    matrices = plain(mixture_matrices, lambda p: (*p.index, kind))
    rows = plain(mixture_rows, lambda p: (*p.index, kind))
    others = [
        Formulation("dense", dense, (2, 0, 4), (1, 0, 2)),
        Formulation("gather matrices + bmm", matrices, (0, 7, 0), (0, 2, 0)),
        Formulation("gather rows", rows, (0, 0, 6), (0, 0, 2)),
    ]
    if kind == "softmax":
        others.append(Formulation("crowd-kit CoNAL", crowdkit_conal, (0, 4, 0)))
    return Op(f"crowd_mixture_nll {kind}", mixture_leaves, ours, others, mixture_work)


OPS = [
    Op(
        "crowd_cross_entropy",
        softmax_leaves,
        plain(crowd_cross_entropy, lambda p: (p.annotations,)),
        [
            Formulation("dense", plain(softmax_dense, lambda p: (p.dense,)), (3, 0, 1), (2, 0, 1)),
            Formulation("gather + bmm", plain(softmax_gather, lambda p: p.index), (0, 2, 0), (0, 1, 0)),
            Formulation("crowd-kit CrowdLayer", crowdkit_crowd_layer, (0, 2, 0)),
        ],
        softmax_work,
    ),
    mixture_op("softplus"),
    mixture_op("softmax"),
]
