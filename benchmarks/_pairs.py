"""The pair confusion of LIA for `kernels.py`: our op and every other formulation of it, with 4 latents in each cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from _formulations import Candidate, Formulation, Op, Problem, plain
from torch import Tensor

from crowdnal.functional import pair_confusion

LATENTS = 4


def leaves(p: Problem) -> list[Tensor]:
    return [p.normal(count, p.C, p.C, LATENTS) for count in (p.B, p.R)]


def posterior(p: Problem) -> Tensor:
    """[B, C], so that the loss is that of an M-step: -sum_i posterior_i . sum_r log Q[:, y_r], over nnz."""
    generator = torch.Generator("cpu").manual_seed(1)  # the same numbers for every device
    return torch.randn(p.B, p.C, dtype=p.dtype, generator=generator, device="cpu").softmax(1).to(p.leaves[0].device)


def ours(p: Problem) -> Candidate:
    difficulty, competence = p.leaves
    weight = posterior(p).index_select(0, p.annotations.item)

    def function(difficulty: Tensor, competence: Tensor) -> Tensor:
        return -(weight * pair_confusion(difficulty, competence, p.annotations)).sum() / p.nnz

    return Candidate(function, (difficulty, competence), p.leaves)


def gather(
    difficulty: Tensor, competence: Tensor, weight: Tensor, item: Tensor, annotator: Tensor, label: Tensor
) -> Tensor:
    pairs = difficulty.index_select(0, item) + competence.index_select(0, annotator)
    log_q = pairs.logsumexp(3).log_softmax(2)
    index = label[:, None, None].expand(-1, log_q.shape[1], 1)
    return -(weight * log_q.gather(2, index).squeeze(2)).sum() / label.shape[0]


def dense(difficulty: Tensor, competence: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    log_q = (difficulty.unsqueeze(1) + competence.unsqueeze(0)).logsumexp(4).log_softmax(3)
    seen = targets >= 0
    index = targets.clamp(min=0)[:, :, None, None].expand(-1, -1, log_q.shape[2], 1)
    chosen = torch.where(seen.unsqueeze(2), log_q.gather(3, index).squeeze(3), 0.0)
    return -(weight * chosen.sum(1)).sum() / seen.sum()


@dataclass(frozen=True)
class PairFormulation(Formulation):
    """`memory` counts B x R x C x C x L, nnz x C x C x L and (B + R) x C x C x L numbers."""

    def bytes(self, p: Problem, compiled: bool) -> float:
        multiples = self.compiled_memory if compiled else self.memory
        assert multiples is not None
        rows = p.B * p.R, p.nnz, p.B + p.R
        return p.dtype.itemsize * p.C**2 * LATENTS * sum(m * n for m, n in zip(multiples, rows, strict=True))


def work(p: Problem) -> tuple[float, float]:
    # Operations: an element of an annotation takes product and sum forward, the same for each of two gradients; one of
    # a tensor that is present an exponential, forward and backward, and a product. Bytes: tensors that are present read
    # by forward and backward, gradients written, dense in R; log_q and what is kept with it written, then read.
    tensor = p.C**2 * LATENTS
    numbers = (3 * p.B + 2 * p.active + p.R) * tensor + 5 * p.nnz * p.C
    index = 2 * 8 * (3 * p.nnz + p.B + 1)
    return numbers * p.dtype.itemsize + index, (6 * p.nnz + 3 * (p.B + p.active)) * tensor


def weighted(data: Callable[[Problem], tuple[Tensor, ...]]) -> Callable[[Problem], tuple[Tensor, ...]]:
    return lambda p: (posterior(p), *data(p))


PAIR_OPS = [
    Op(
        "pair_confusion",
        leaves,
        ours,
        [
            PairFormulation("dense", plain(dense, weighted(lambda p: (p.dense,))), (4, 0, 1), (2, 0, 1)),
            PairFormulation(
                "gather",
                plain(gather, lambda p: (posterior(p).index_select(0, p.annotations.item), *p.index)),
                (0, 4, 1),
                (0, 2, 1),
            ),
        ],
        work,
    )
]
