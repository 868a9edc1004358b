"""The mixture link: fakes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crowdnal import reference
from crowdnal.ops._declare import declare


@declare(reference.mixture_link, shapes="log_probs:BC confusion:RKC weight:N", matrices=("confusion",))
def mixture_link(a: Any) -> tuple[Tensor, ...]:
    """Loss [], nll [nnz], posterior [nnz, C], log_norm."""
    new, classes = a.log_probs.new_empty, a.confusion.shape[2]
    return new(()), new(a.nnz), new(a.nnz, classes), new(num_norms(a), classes)


def num_norms(a: Any) -> Any:
    """Rows of log_norm: one per annotator who is present, at most."""
    return 0 if a.normalization == reference.NONE else torch.sym_min(a.nnz, a.confusion.shape[0])


@declare(
    reference.mixture_link_backward,
    shapes="grad_loss: grad_nll:N log_probs:BC confusion:RKC weight:N posterior:NC log_norm:MC",
    matrices=("confusion",),
)
def mixture_link_backward(a: Any) -> tuple[Tensor, Tensor]:
    """Gradients of log_probs and confusion; 0 rows where not needed."""
    return _gradients(a)


@declare(
    reference.mixture_link_step,
    shapes="log_probs:BC confusion:RKC weight:N prior:KC labels_given:R",
    matrices=("confusion",),
)
def mixture_link_step(a: Any) -> tuple[Tensor, ...]:
    """Loss [], nll [nnz], and the gradients."""
    new = a.log_probs.new_empty
    return new(()), new(a.nnz), *_gradients(a)


def _gradients(a: Any) -> tuple[Tensor, Tensor]:
    new, (num_annotators, labels, classes) = a.log_probs.new_empty, a.confusion.shape
    return (
        new(a.num_items if a.need_log_probs else 0, classes),
        new(num_annotators if a.need_confusion else 0, labels, classes),
    )
