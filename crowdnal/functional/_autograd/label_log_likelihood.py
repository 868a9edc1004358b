"""The sufficient statistics of the joint link as autograd Functions: log-likelihood per item, counts per annotator.

Each other's adjoints, so derivatives of any order stay native. Confusions have the observed label outermost.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from crowdnal.functional._autograd._function import Index, OpFunction, VmapBatch, add
from crowdnal.functional.segments import finite, row_products
from crowdnal.ops import label_log_likelihood as ops


class LabelLogLikelihood(OpFunction):
    """out[i, k] = sum over annotations n of item i of w_n log_confusion[annotator_n, label_n, k], [B, C]."""

    op = ops.label_log_likelihood

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """The adjoint for the matrices, a product of rows for the weight."""
        (a,), need = LabelLogLikelihood.kept(ctx), LabelLogLikelihood.needs(ctx)
        log_confusion = weight = None
        if need.log_confusion:
            log_confusion = label_counts(cotangent, a.weight, a.index, a.label, *a.log_confusion.shape[:2])
        if need.weight:
            weight = row_products(cotangent, a.log_confusion, a.index, a.label)
        return ops.label_log_likelihood.gradients(log_confusion=log_confusion, weight=weight)

    @staticmethod
    def jvp(ctx: Any, confusion_t: Tensor | None, weight_t: Tensor | None, *_: Any) -> Tensor:
        """Bilinear: one term per argument."""
        (a,) = LabelLogLikelihood.kept(ctx)
        return add(
            None if confusion_t is None else label_log_likelihood(confusion_t, a.weight, a.index, a.label),
            None if weight_t is None else label_log_likelihood(finite(a.log_confusion), weight_t, a.index, a.label),
        )

    @staticmethod
    def vmap_op(batch: VmapBatch) -> Any:
        """Matrices that all problems share are read once."""
        return batch.run(batch.fold("weight", "label", matrices="log_confusion")), 0


class LabelCounts(OpFunction):
    """out[r, y, k] = sum over annotations n of r with label y of w_n values[item_n, k], [R, K, C]."""

    op = ops.label_counts

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """The adjoint for the values, a product of rows for the weight."""
        (a,), need = LabelCounts.kept(ctx), LabelCounts.needs(ctx)
        return ops.label_counts.gradients(
            values=label_log_likelihood(cotangent, a.weight, a.index, a.label) if need.values else None,
            weight=row_products(a.values, cotangent, a.index, a.label) if need.weight else None,
        )

    @staticmethod
    def jvp(ctx: Any, values_t: Tensor | None, weight_t: Tensor | None, *_: Any) -> Tensor:
        """Bilinear: one term per argument."""
        (a,) = LabelCounts.kept(ctx)
        rest = a.index, a.label, a.num_annotators, a.num_labels
        return add(
            None if values_t is None else label_counts(values_t, a.weight, *rest),
            None if weight_t is None else label_counts(a.values, weight_t, *rest),
        )

    @staticmethod
    def vmap_op(batch: VmapBatch) -> Any:
        """As many matrices as problems times annotators."""
        return batch.run(batch.fold("values", "weight", "label")), 0


def label_log_likelihood(log_confusion: Tensor, weight: Tensor | None, index: Index, label: Tensor) -> Tensor:
    """`LabelLogLikelihood` on raw index tensors."""
    return ops.label_log_likelihood(log_confusion, weight, *index, label)


def label_counts(
    values: Tensor,
    weight: Tensor | None,
    index: Index,
    label: Tensor,
    num_annotators: int,
    num_labels: int,
) -> Tensor:
    """`LabelCounts` on raw index tensors."""
    return ops.label_counts(values, weight, *index, label, num_annotators, num_labels)
