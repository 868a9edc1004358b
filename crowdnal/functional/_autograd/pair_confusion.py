"""Pair confusion: log Q_n[k, y_n] of LIA, from a tensor per item and a tensor per annotator.

One op forward, one backward. Second derivatives and forward mode are exact, in plain PyTorch on blocks of annotations,
so that nothing of size nnz x C x K x L is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crowdnal import reference
from crowdnal.functional._autograd._function import OpFunction, VmapBatch, add
from crowdnal.functional.segments import scatter_rows
from crowdnal.ops import pair_confusion as ops

BLOCK_NUMBERS = 2**20
"""About this many numbers of [C, K, L] tensors are gathered at once."""


class PairConfusion(OpFunction):
    """(log_q [nnz, C], log_norm [nnz, C]); see `crowdnal.reference.pair_confusion`."""

    op = ops.pair_confusion

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps inputs and outputs only, so that second order is exact."""
        _, log_norm = output
        ctx.mark_non_differentiable(log_norm)
        ctx.set_materialize_grads(False)
        PairConfusion.keep(ctx, inputs, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> Any:
        """One fused op."""
        (a, log_q, log_norm), need = PairConfusion.kept(ctx), PairConfusion.needs(ctx)
        if grad is None:
            return ops.pair_confusion.gradients()
        difficulty, competence = ops.pair_confusion_backward(
            grad=grad, **a._asdict(), log_q=log_q, log_norm=log_norm, need_difficulty=need.difficulty,
            need_competence=need.competence,
        )  # fmt: skip
        return ops.pair_confusion.gradients(
            difficulty=difficulty if need.difficulty else None, competence=competence if need.competence else None
        )

    @staticmethod
    def jvp(ctx: Any, difficulty_t: Any, competence_t: Any, *_: Any) -> Any:
        """The change of the observed label's logsumexp less that of all labels."""
        pairs = _Pairs(PairConfusion.kept(ctx)[0])
        rows = [pairs.change(block, difficulty_t, competence_t).log_q for block in pairs.blocks()]
        return pairs.join(rows), None

    @staticmethod
    def vmap_op(batch: VmapBatch) -> Any:
        """Competences that all problems share are read once."""
        return batch.run(batch.fold("difficulty", "label", matrices="competence")), (0, 0)


class PairConfusionBackward(OpFunction):
    """Gradients of `PairConfusion` for difficulty and competence; of no use where a `need_` is False."""

    op = ops.pair_confusion_backward

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the inputs, not `log_q` and `log_norm`: they are functions of them."""
        ctx.set_materialize_grads(False)
        PairConfusionBackward.keep(ctx, inputs, without=["log_q", "log_norm"])

    @staticmethod
    def backward(ctx: Any, difficulty_c: Any, competence_c: Any) -> Any:
        """Derivative of sum_n grad_n . (change of log_q_n along the cotangents)."""
        (a,), need = PairConfusionBackward.kept(ctx), PairConfusionBackward.needs(ctx)
        difficulty_c = difficulty_c if a.need_difficulty else None
        competence_c = competence_c if a.need_competence else None
        if difficulty_c is None and competence_c is None:
            return ops.pair_confusion_backward.gradients()
        needs = need.difficulty, need.competence
        grad, difficulty, competence = _Pairs(a).second_order(a.grad, difficulty_c, competence_c, needs)
        return ops.pair_confusion_backward.gradients(grad=grad, difficulty=difficulty, competence=competence)

    @staticmethod
    def jvp(ctx: Any, grad_t: Any, difficulty_t: Any, competence_t: Any, *_: Any) -> Any:
        """Linear in grad; the same second derivative along the other tangents."""
        (a,) = PairConfusionBackward.kept(ctx)
        pairs, needs = _Pairs(a), (a.need_difficulty, a.need_competence)
        linear = second = (None, None)
        if grad_t is not None:
            log_q, log_norm = ops.pair_confusion(a.difficulty, a.competence, *a.index, a.label)
            linear = ops.pair_confusion_backward(*a._replace(grad=grad_t, log_q=log_q, log_norm=log_norm))
        if difficulty_t is not None or competence_t is not None:
            second = pairs.second_order(a.grad, difficulty_t, competence_t, needs)[1:]
        empty = pairs.zeros(0, *pairs.competence.shape[1:])
        return tuple(add(x, y) if need else empty for x, y, need in zip(linear, second, needs, strict=True))

    @staticmethod
    def vmap_op(batch: VmapBatch) -> Any:
        """As `PairConfusion`, but for gradients of competences."""
        rows, share = ("grad", "difficulty", "label", "log_q", "log_norm"), not batch.arguments.need_competence
        return batch.run(batch.fold(*rows, matrices="competence", share=share)), (0, 0)


class _Change(NamedTuple):
    """How log_q of a block of annotations changes along tangents, and how that depends on the pairs."""

    log_q: Tensor  # [n, C]
    others: Tensor  # [n, C, K, L] softmax over labels and latents, times the tangent's deviation from its mean
    own: Tensor  # [n, C, L] the same over the latents of the observed label


class _Pairs:
    """difficulty_i + competence_r [n, C, K, L] of blocks of annotations, in plain PyTorch."""

    def __init__(self, arguments: Any) -> None:
        self.difficulty, self.competence = arguments.difficulty, arguments.competence
        self.item, self.annotator, self.label = arguments.item, arguments.annotator, arguments.label

    def blocks(self) -> Iterator[slice]:
        nnz, step = self.label.shape[0], max(1, BLOCK_NUMBERS // math.prod(self.competence.shape[1:]))
        return (slice(first, min(first + step, nnz)) for first in range(0, nnz, step))

    def gather(self, block: slice, of_item: Tensor | None, of_annotator: Tensor | None) -> Tensor:
        """The sum of what is there, [n, C, K, L]."""
        return add(
            None if of_item is None else reference.widen(of_item.index_select(0, self.item[block])),
            None if of_annotator is None else reference.widen(of_annotator.index_select(0, self.annotator[block])),
        )

    def change(self, block: slice, difficulty_t: Tensor | None, competence_t: Tensor | None) -> _Change:
        """Along the tangents of difficulty and competence, one at least."""
        label = self.label[block]
        pairs = self.gather(block, self.difficulty, self.competence)
        pairs_t = self.gather(block, difficulty_t, competence_t)
        share, own_share = _softmax(pairs, 2), _softmax(reference.observed(pairs, label), 1)
        own_t = reference.observed(pairs_t, label)
        mean_t = (share * pairs_t).sum((2, 3), keepdim=True)
        own_mean_t = (own_share * own_t).sum(2, keepdim=True)
        log_q = own_mean_t.squeeze(2) - mean_t.squeeze(3).squeeze(2)
        return _Change(log_q, share * (pairs_t - mean_t), own_share * (own_t - own_mean_t))

    def join(self, rows: list[Tensor]) -> Tensor:
        """[nnz, C]."""
        return torch.cat(rows) if rows else self.zeros(0, self.competence.shape[1])

    def zeros(self, *sizes: int) -> Tensor:
        return self.competence.new_zeros(sizes, dtype=reference.compute_dtype(self.competence.dtype))

    def second_order(self, grad: Tensor, difficulty_t: Any, competence_t: Any, needs: Any) -> tuple[Any, Any, Any]:
        """sum_n grad_n . (change of log_q_n): its derivatives for grad, difficulty and competence."""
        rows = []
        ddifficulty = self.zeros(*self.difficulty.shape) if needs[0] else None
        dcompetence = self.zeros(*self.competence.shape) if needs[1] else None
        for block in self.blocks():
            change, g = self.change(block, difficulty_t, competence_t), grad[block].unsqueeze(2)
            rows.append(change.log_q)
            q = reference.add_observed(-g.unsqueeze(3) * change.others, self.label[block], g * change.own)
            if ddifficulty is not None:
                ddifficulty = ddifficulty + self._sum(q, self.item[block], len(self.difficulty))
            if dcompetence is not None:
                dcompetence = dcompetence + self._sum(q, self.annotator[block], len(self.competence))
        return self.join(rows), ddifficulty, dcompetence

    @staticmethod
    def _sum(rows: Tensor, key: Tensor, num_rows: int) -> Tensor:
        """Rows [n, C, K, L] summed by their keys, in a fixed order on every device."""
        flat = scatter_rows(rows.reshape(len(rows), -1), key, torch.argsort(key, stable=True), num_rows)
        return flat.reshape(num_rows, *rows.shape[1:])


def _softmax(values: Tensor, dims: int) -> Tensor:
    """Softmax over the last `dims` dimensions; 0 where all are -infinity."""
    flat = values.flatten(-dims)
    empty = (flat == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(flat.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0).reshape(values.shape)
