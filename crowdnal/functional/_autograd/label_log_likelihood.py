"""The sufficient statistics of the joint link as autograd Functions: log-likelihood per item, counts per annotator.

Each other's adjoints, so derivatives of any order stay native. Confusions have the observed label outermost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from crowdnal import ops
from crowdnal.functional._autograd._function import OpFunction, VmapBatch, add, call, save
from crowdnal.functional.segments import finite, row_products

_ops = torch.ops.crowdnal


class LabelLogLikelihood(OpFunction):
    """out[i, k] = sum over annotations n of item i of w_n log_confusion[annotator_n, label_n, k]."""

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        """Returns [B, C]."""
        return call(_ops.label_log_likelihood.default, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the inputs."""
        save(ctx, *inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """The adjoint for the matrices, a product of rows for the weight."""
        log_confusion, weight, *index, label = ctx.saved_tensors
        need_confusion, need_weight = ctx.needs_input_grad[:2]
        return (
            label_counts(cotangent, weight, index, label, *log_confusion.shape[:2]) if need_confusion else None,
            row_products(cotangent, log_confusion, index, label) if need_weight else None,
            *[None] * 5,
        )

    @staticmethod
    def jvp(ctx: Any, confusion_t: Tensor | None, weight_t: Tensor | None, *_: Any) -> Tensor:
        """Bilinear: one term an argument."""
        log_confusion, weight, *index, label = ctx.saved_tensors
        return add(
            None if confusion_t is None else label_log_likelihood(confusion_t, weight, index, label),
            None if weight_t is None else label_log_likelihood(finite(log_confusion), weight_t, index, label),
        )


class LabelCounts(OpFunction):
    """out[r, y, k] = sum over annotations n of r with label y of w_n values[item_n, k]."""

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        """Returns [R, K, C]."""
        return call(_ops.label_counts.default, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the inputs."""
        save(ctx, *inputs[:7])
        ctx.sizes = inputs[7:]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """The adjoint for the values, a product of rows for the weight."""
        values, weight, *index, label = ctx.saved_tensors
        need_values, need_weight = ctx.needs_input_grad[:2]
        return (
            label_log_likelihood(cotangent, weight, index, label) if need_values else None,
            row_products(values, cotangent, index, label) if need_weight else None,
            *[None] * 7,
        )

    @staticmethod
    def jvp(ctx: Any, values_t: Tensor | None, weight_t: Tensor | None, *_: Any) -> Tensor:
        """Bilinear: one term an argument."""
        values, weight, *index, label = ctx.saved_tensors
        return add(
            None if values_t is None else label_counts(values_t, weight, index, label, *ctx.sizes),
            None if weight_t is None else label_counts(values, weight_t, index, label, *ctx.sizes),
        )


def label_log_likelihood(
    log_confusion: Tensor, weight: Tensor | None, index: Sequence[Tensor], label: Tensor
) -> Tensor:
    """`LabelLogLikelihood` on raw index tensors."""
    arguments = (log_confusion, weight, *index, label)
    return (
        _ops.label_log_likelihood(*arguments) if torch.compiler.is_compiling() else LabelLogLikelihood.run(*arguments)
    )


def label_counts(
    values: Tensor,
    weight: Tensor | None,
    index: Sequence[Tensor],
    label: Tensor,
    num_annotators: int,
    num_labels: int,
) -> Tensor:
    """`LabelCounts` on raw index tensors."""
    arguments = (values, weight, *index, label, num_annotators, num_labels)
    return _ops.label_counts(*arguments) if torch.compiler.is_compiling() else LabelCounts.run(*arguments)


def _log_likelihood_vmap(info: Any, dims: Any, *inputs: Any) -> tuple[Tensor, int]:
    log_confusion, weight, *index, label = inputs
    batch = VmapBatch(info.batch_size)
    log_confusion, num_annotators = batch.matrices(log_confusion, dims[0])
    folded = batch.index(index, dims[2:6], num_annotators)
    out = _ops.label_log_likelihood(log_confusion, batch.rows(weight, dims[1]), *folded, batch.rows(label, dims[6]))
    return batch.split(out), 0


def _label_counts_vmap(info: Any, dims: Any, *inputs: Any) -> tuple[Tensor, int]:
    values, weight, *index, label, num_annotators, num_labels = inputs
    batch = VmapBatch(info.batch_size)
    folded = batch.index(index, dims[2:6], num_annotators)
    rows = batch.rows(values, dims[0]), batch.rows(weight, dims[1])
    out = _ops.label_counts(*rows, *folded, batch.rows(label, dims[6]), batch.size * num_annotators, num_labels)
    return batch.split(out), 0


ops.register("label_log_likelihood", LabelLogLikelihood, _log_likelihood_vmap)
ops.register("label_counts", LabelCounts, _label_counts_vmap)
