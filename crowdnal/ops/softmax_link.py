"""The softmax link: fakes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from crowdnal import reference
from crowdnal.ops._declare import declare


@declare(reference.softmax_link, shapes="scores:BC confusion:RCK shared:BK mixing:N weight:N", matrices=("confusion",))
def softmax_link(a: Any) -> tuple[Tensor, ...]:
    """Loss [], nll [nnz], probs [nnz, K]."""
    new = a.scores.new_empty
    return new(()), new(a.nnz), new(a.nnz, a.confusion.shape[2])


@declare(
    reference.softmax_link_backward,
    shapes="grad_loss: grad_nll:N scores:BC confusion:RCK shared:BK mixing:N weight:N probs:NK",
    matrices=("confusion",),
)
def softmax_link_backward(a: Any) -> tuple[Tensor, ...]:
    """Gradients of scores, confusion, shared and mixing; 0 rows where not needed."""
    return _gradients(a)


@declare(
    reference.softmax_link_step,
    shapes="scores:BC confusion:RCK shared:BK mixing:N weight:N prior:CK common:CK labels_given:R",
    matrices=("confusion",),
)
def softmax_link_step(a: Any) -> tuple[Tensor, ...]:
    """Loss [], nll [nnz], and the gradients."""
    new = a.scores.new_empty
    return new(()), new(a.nnz), *_gradients(a)


def _gradients(a: Any) -> tuple[Tensor, ...]:
    new, (num_annotators, classes, labels) = a.scores.new_empty, a.confusion.shape
    return (
        new(a.num_items if a.need_scores else 0, classes),
        new(num_annotators if a.need_confusion else 0, classes, labels),
        new(a.num_items if a.need_shared else 0, labels),
        new(a.nnz if a.need_mixing else 0),
    )
