"""The three primitives as autograd Functions: each other's adjoints, so derivatives of any order stay native.

Under `torch.compile` the raw ops are called (Dynamo refuses Functions with a `jvp`); they carry the same backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from crowdnal import ops
from crowdnal.functional._autograd._function import OpFunction, VmapBatch, add, call, save

_ops = torch.ops.crowdnal


class Mix(OpFunction):
    """h[n, k] = sum_c scores[item_n, c] confusion[annotator_n, c, k]."""

    @staticmethod
    def forward(scores: Tensor, confusion: Tensor, *index: Tensor) -> Tensor:
        """Returns [nnz, K]."""
        return call(_ops.mix.default, scores, confusion, *index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the inputs."""
        save(ctx, *inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The other two primitives."""
        scores, confusion, *index = ctx.saved_tensors
        need_scores, need_confusion = ctx.needs_input_grad[:2]
        return (
            mix_items(grad, confusion, index) if need_scores else None,
            mix_annotators(scores, grad, index, confusion.shape[0]) if need_confusion else None,
            *[None] * 4,
        )

    @staticmethod
    def jvp(ctx: Any, scores_t: Tensor | None, confusion_t: Tensor | None, *_: Any) -> Tensor:
        """Bilinear: one term an argument."""
        scores, confusion, *index = ctx.saved_tensors
        return add(
            None if scores_t is None else mix(scores_t, confusion, index),
            None if confusion_t is None else mix(scores, confusion_t, index),
        )


class MixItems(OpFunction):
    """out[i, c] = sum over annotations n of item i of sum_k grad[n, k] confusion[annotator_n, c, k]."""

    @staticmethod
    def forward(grad: Tensor, confusion: Tensor, *index: Tensor) -> Tensor:
        """Returns [B, C]."""
        return call(_ops.mix_items.default, grad, confusion, *index)

    setup_context = Mix.setup_context

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """The other two primitives."""
        grad, confusion, *index = ctx.saved_tensors
        need_grad, need_confusion = ctx.needs_input_grad[:2]
        return (
            mix(cotangent, confusion, index) if need_grad else None,
            mix_annotators(cotangent, grad, index, confusion.shape[0]) if need_confusion else None,
            *[None] * 4,
        )

    @staticmethod
    def jvp(ctx: Any, grad_t: Tensor | None, confusion_t: Tensor | None, *_: Any) -> Tensor:
        """Bilinear: one term an argument."""
        grad, confusion, *index = ctx.saved_tensors
        return add(
            None if grad_t is None else mix_items(grad_t, confusion, index),
            None if confusion_t is None else mix_items(grad, confusion_t, index),
        )


class MixAnnotators(OpFunction):
    """out[r, c, k] = sum over annotations n of annotator r of scores[item_n, c] grad[n, k]."""

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        """Returns [R, C, K]."""
        return call(_ops.mix_annotators.default, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the inputs."""
        save(ctx, *inputs[:6])
        ctx.num_annotators = inputs[6]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """The other two primitives."""
        scores, grad, *index = ctx.saved_tensors
        need_scores, need_grad = ctx.needs_input_grad[:2]
        return (
            mix_items(grad, cotangent, index) if need_scores else None,
            mix(scores, cotangent, index) if need_grad else None,
            *[None] * 5,
        )

    @staticmethod
    def jvp(ctx: Any, scores_t: Tensor | None, grad_t: Tensor | None, *_: Any) -> Tensor:
        """Bilinear: one term an argument."""
        scores, grad, *index = ctx.saved_tensors
        return add(
            None if scores_t is None else mix_annotators(scores_t, grad, index, ctx.num_annotators),
            None if grad_t is None else mix_annotators(scores, grad_t, index, ctx.num_annotators),
        )


def mix(scores: Tensor, confusion: Tensor, index: Sequence[Tensor]) -> Tensor:
    """`Mix` on raw index tensors."""
    arguments = (scores, confusion, *index)
    return _ops.mix(*arguments) if torch.compiler.is_compiling() else Mix.run(*arguments)


def mix_items(grad: Tensor, confusion: Tensor, index: Sequence[Tensor]) -> Tensor:
    """`MixItems` on raw index tensors."""
    arguments = (grad, confusion, *index)
    return _ops.mix_items(*arguments) if torch.compiler.is_compiling() else MixItems.run(*arguments)


def mix_annotators(scores: Tensor, grad: Tensor, index: Sequence[Tensor], num_annotators: int) -> Tensor:
    """`MixAnnotators` on raw index tensors."""
    arguments = (scores, grad, *index, num_annotators)
    return _ops.mix_annotators(*arguments) if torch.compiler.is_compiling() else MixAnnotators.run(*arguments)


def _read_vmap(op: Any, info: Any, dims: Any, rows: Tensor, confusion: Tensor, *index: Tensor) -> tuple[Tensor, int]:
    """Rule of the ops that only read the matrices: `mix` and `mix_items`."""
    batch = VmapBatch(info.batch_size)
    confusion, num_annotators = batch.matrices(confusion, dims[1])
    return batch.split(op(batch.rows(rows, dims[0]), confusion, *batch.index(index, dims[2:], num_annotators))), 0


def _mix_annotators_vmap(info: Any, dims: Any, scores: Tensor, grad: Tensor, *rest: Any) -> tuple[Tensor, int]:
    *index, num_annotators = rest
    batch = VmapBatch(info.batch_size)
    folded = batch.index(index, dims[2:6], num_annotators)
    rows = batch.rows(scores, dims[0]), batch.rows(grad, dims[1])
    return batch.split(_ops.mix_annotators(*rows, *folded, batch.size * num_annotators)), 0


ops.register("mix", Mix, partial(_read_vmap, _ops.mix))
ops.register("mix_items", MixItems, partial(_read_vmap, _ops.mix_items))
ops.register("mix_annotators", MixAnnotators, _mix_annotators_vmap)
