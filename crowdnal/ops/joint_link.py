"""The joint link: fakes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from crowdnal import reference
from crowdnal.ops._declare import declare
from crowdnal.ops.mixture_link import num_norms


@declare(reference.joint_link, shapes="log_prior:BC confusion:RKC weight:N", matrices=("confusion",))
def joint_link(a: Any) -> tuple[Tensor, ...]:
    """Loss [], nll [B], posterior [B, C], log_norm."""
    new, classes = a.log_prior.new_empty, a.confusion.shape[2]
    return new(()), new(a.num_items), new(a.num_items, classes), new(num_norms(a), classes)


@declare(
    reference.joint_link_backward,
    shapes="grad_loss: grad_nll:B log_prior:BC confusion:RKC weight:N posterior:BC log_norm:MC",
    matrices=("confusion",),
)
def joint_link_backward(a: Any) -> tuple[Tensor, Tensor]:
    """Gradients of log_prior and confusion; 0 rows where not needed."""
    return _gradients(a)


@declare(reference.joint_link_step, shapes="log_prior:BC confusion:RKC weight:N", matrices=("confusion",))
def joint_link_step(a: Any) -> tuple[Tensor, ...]:
    """Loss [], nll [B], and the gradients."""
    new = a.log_prior.new_empty
    return new(()), new(a.num_items), *_gradients(a)


def _gradients(a: Any) -> tuple[Tensor, Tensor]:
    new, (num_annotators, labels, classes) = a.log_prior.new_empty, a.confusion.shape
    return (
        new(a.num_items if a.need_log_prior else 0, classes),
        new(num_annotators if a.need_confusion else 0, labels, classes),
    )
