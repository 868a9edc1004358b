"""Pair confusion: log Q_n[k, y_n] of LIA, from a tensor an item and a tensor an annotator.

One op forward, one backward. Second derivatives and forward mode are exact, in plain PyTorch on blocks of annotations,
so that nothing of size nnz x C x K x L is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crowdnal import ops, reference
from crowdnal.functional._autograd._function import OpFunction, VmapBatch, add, call, save

_ops = torch.ops.crowdnal

BLOCK_NUMBERS = 2**20
"""About this many numbers of [C, K, L] tensors are gathered at once."""


class PairConfusion(OpFunction):
    """(log_q [nnz, C], log_norm [nnz, C]); see `crowdnal.reference.pair_confusion`."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        """The fused op."""
        return call(_ops.pair_confusion, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps inputs and outputs only, so that second order is exact."""
        _, log_norm = output
        ctx.mark_non_differentiable(log_norm)
        ctx.set_materialize_grads(False)
        save(ctx, *inputs, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> Any:
        """One fused op."""
        if grad is None:
            return (None,) * 7
        needs = ctx.needs_input_grad[:2]
        arguments = (grad, *ctx.saved_tensors, *needs)
        if torch.compiler.is_compiling():
            grads = _ops.pair_confusion_backward(*arguments)
        else:
            grads = PairConfusionBackward.run(*arguments)
        return (*(g if need else None for g, need in zip(grads, needs, strict=True)), *[None] * 5)

    @staticmethod
    def jvp(ctx: Any, difficulty_t: Any, competence_t: Any, *_: Any) -> Any:
        """The change of the observed label's logsumexp less that of all labels."""
        pairs = _Pairs(*ctx.saved_tensors[:7])
        rows = [pairs.change(block, difficulty_t, competence_t).log_q for block in pairs.blocks()]
        return pairs.join(rows), None


class PairConfusionBackward(OpFunction):
    """Gradients of `PairConfusion` for difficulty and competence; of no use where a `need_` is False."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        """The fused op."""
        return call(_ops.pair_confusion_backward, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the inputs, not `log_q` and `log_norm`: they are functions of them."""
        ctx.set_materialize_grads(False)
        save(ctx, *inputs[:8])
        ctx.needs = inputs[10:]

    @staticmethod
    def backward(ctx: Any, difficulty_c: Any, competence_c: Any) -> Any:
        """Derivative of sum_n grad_n . (change of log_q_n along the cotangents)."""
        grad, *inputs = ctx.saved_tensors
        cotangents = (c if need else None for c, need in zip((difficulty_c, competence_c), ctx.needs, strict=True))
        difficulty_c, competence_c = cotangents
        if difficulty_c is None and competence_c is None:
            return (None,) * 12
        pairs = _Pairs(*inputs)
        return (*pairs.second_order(grad, difficulty_c, competence_c, ctx.needs_input_grad[1:3]), *[None] * 9)

    @staticmethod
    def jvp(ctx: Any, grad_t: Any, difficulty_t: Any, competence_t: Any, *_: Any) -> Any:
        """Linear in grad; the same second derivative along the other tangents."""
        grad, *inputs = ctx.saved_tensors
        pairs = _Pairs(*inputs)
        linear = second = (None, None)
        if grad_t is not None:
            linear = PairConfusionBackward.run(grad_t, *inputs, *PairConfusion.run(*inputs), *ctx.needs)
        if difficulty_t is not None or competence_t is not None:
            second = pairs.second_order(grad, difficulty_t, competence_t, ctx.needs)[1:]
        empty = pairs.zeros(0, *pairs.competence.shape[1:])
        return tuple(add(a, b) if need else empty for a, b, need in zip(linear, second, ctx.needs, strict=True))


class _Change(NamedTuple):
    """How log_q of a block of annotations changes along tangents, and how that depends on the pairs."""

    log_q: Tensor  # [n, C]
    others: Tensor  # [n, C, K, L] softmax over labels and latents, times the tangent's deviation from its mean
    own: Tensor  # [n, C, L] the same over the latents of the observed label


class _Pairs:
    """difficulty_i + competence_r [n, C, K, L] of blocks of annotations, in plain PyTorch."""

    def __init__(self, difficulty: Tensor, competence: Tensor, *rest: Tensor) -> None:
        self.difficulty, self.competence = difficulty, competence
        _, self.item, self.annotator, _, self.label = rest

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
                ddifficulty = ddifficulty.index_add(0, self.item[block], q)
            if dcompetence is not None:
                dcompetence = dcompetence.index_add(0, self.annotator[block], q)
        return self.join(rows), ddifficulty, dcompetence


def _softmax(values: Tensor, dims: int) -> Tensor:
    """Softmax over the last `dims` dimensions; 0 where all are -infinity."""
    flat = values.flatten(-dims)
    empty = (flat == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(flat.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0).reshape(values.shape)


def _vmap(info: Any, dims: Any, difficulty: Tensor, competence: Tensor, *rest: Tensor) -> Any:
    *index, label = rest
    batch = VmapBatch(info.batch_size)
    competence, num_annotators = batch.matrices(competence, dims[1])
    folded = batch.index(index, dims[2:6], num_annotators)
    out = _ops.pair_confusion(batch.rows(difficulty, dims[0]), competence, *folded, batch.rows(label, dims[6]))
    return tuple(batch.split(o) for o in out), (0, 0)


def _backward_vmap(info: Any, dims: Any, *inputs: Any) -> Any:
    grad, difficulty, competence, *index, label, log_q, log_norm, need_difficulty, need_competence = inputs
    batch = VmapBatch(info.batch_size)
    competence, num_annotators = batch.matrices(competence, dims[2], share=not need_competence)
    folded = batch.index(index, dims[3:7], num_annotators)
    out = _ops.pair_confusion_backward(
        batch.rows(grad, dims[0]), batch.rows(difficulty, dims[1]), competence, *folded, batch.rows(label, dims[7]),
        batch.rows(log_q, dims[8]), batch.rows(log_norm, dims[9]), need_difficulty, need_competence,
    )  # fmt: skip
    return tuple(batch.split(o) for o in out), (0, 0)


ops.register("pair_confusion", PairConfusion, _vmap)
ops.register("pair_confusion_backward", PairConfusionBackward, _backward_vmap)
