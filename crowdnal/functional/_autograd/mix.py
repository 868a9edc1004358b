"""The three primitives as autograd Functions: each other's adjoints, so derivatives of any order stay native."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from crowdnal.functional._autograd._function import Index, OpFunction, VmapBatch, add
from crowdnal.ops import mix as ops


class Mix(OpFunction):
    """h[n, k] = sum_c scores[item_n, c] confusion[annotator_n, c, k], [nnz, K]."""

    op = ops.mix

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The other two primitives."""
        (a,), need = Mix.kept(ctx), Mix.needs(ctx)
        return ops.mix.gradients(
            scores=mix_items(grad, a.confusion, a.index) if need.scores else None,
            confusion=mix_annotators(a.scores, grad, a.index, a.confusion.shape[0]) if need.confusion else None,
        )

    @staticmethod
    def jvp(ctx: Any, scores_t: Tensor | None, confusion_t: Tensor | None, *_: Any) -> Tensor:
        """Bilinear: one term per argument."""
        (a,) = Mix.kept(ctx)
        return add(
            None if scores_t is None else mix(scores_t, a.confusion, a.index),
            None if confusion_t is None else mix(a.scores, confusion_t, a.index),
        )

    @staticmethod
    def vmap_op(batch: VmapBatch) -> Any:
        """Matrices that all problems share are read once."""
        return batch.run(batch.fold("scores", matrices="confusion")), 0


class MixItems(OpFunction):
    """out[i, c] = sum over annotations n of item i of sum_k grad[n, k] confusion[annotator_n, c, k], [B, C]."""

    op = ops.mix_items

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """The other two primitives."""
        (a,), need = MixItems.kept(ctx), MixItems.needs(ctx)
        return ops.mix_items.gradients(
            grad=mix(cotangent, a.confusion, a.index) if need.grad else None,
            confusion=mix_annotators(cotangent, a.grad, a.index, a.confusion.shape[0]) if need.confusion else None,
        )

    @staticmethod
    def jvp(ctx: Any, grad_t: Tensor | None, confusion_t: Tensor | None, *_: Any) -> Tensor:
        """Bilinear: one term per argument."""
        (a,) = MixItems.kept(ctx)
        return add(
            None if grad_t is None else mix_items(grad_t, a.confusion, a.index),
            None if confusion_t is None else mix_items(a.grad, confusion_t, a.index),
        )

    @staticmethod
    def vmap_op(batch: VmapBatch) -> Any:
        """As `Mix`."""
        return batch.run(batch.fold("grad", matrices="confusion")), 0


class MixAnnotators(OpFunction):
    """out[r, c, k] = sum over annotations n of annotator r of scores[item_n, c] grad[n, k], [R, C, K]."""

    op = ops.mix_annotators

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """The other two primitives."""
        (a,), need = MixAnnotators.kept(ctx), MixAnnotators.needs(ctx)
        return ops.mix_annotators.gradients(
            scores=mix_items(a.grad, cotangent, a.index) if need.scores else None,
            grad=mix(a.scores, cotangent, a.index) if need.grad else None,
        )

    @staticmethod
    def jvp(ctx: Any, scores_t: Tensor | None, grad_t: Tensor | None, *_: Any) -> Tensor:
        """Bilinear: one term per argument."""
        (a,) = MixAnnotators.kept(ctx)
        return add(
            None if scores_t is None else mix_annotators(scores_t, a.grad, a.index, a.num_annotators),
            None if grad_t is None else mix_annotators(a.scores, grad_t, a.index, a.num_annotators),
        )

    @staticmethod
    def vmap_op(batch: VmapBatch) -> Any:
        """As many matrices as problems times annotators."""
        return batch.run(batch.fold("scores", "grad")), 0


def mix(scores: Tensor, confusion: Tensor, index: Index) -> Tensor:
    """`Mix` on raw index tensors."""
    return ops.mix(scores, confusion, *index)


def mix_items(grad: Tensor, confusion: Tensor, index: Index) -> Tensor:
    """`MixItems` on raw index tensors."""
    return ops.mix_items(grad, confusion, *index)


def mix_annotators(scores: Tensor, grad: Tensor, index: Index, num_annotators: int) -> Tensor:
    """`MixAnnotators` on raw index tensors."""
    return ops.mix_annotators(scores, grad, *index, num_annotators)
