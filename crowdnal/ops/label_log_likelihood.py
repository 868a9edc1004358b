"""The sufficient statistics of the joint link: fakes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from crowdnal import reference
from crowdnal.ops._declare import declare


@declare(reference.label_log_likelihood, shapes="log_confusion:RKC weight:N", matrices=("log_confusion",))
def label_log_likelihood(a: Any) -> Tensor:
    """[B, C]."""
    return reference.new_empty(a.log_confusion, a.num_items, a.log_confusion.shape[2])


@declare(
    reference.label_counts,
    shapes="values:BC weight:N",
)
def label_counts(a: Any) -> Tensor:
    """[R, K, C]."""
    return a.values.new_empty(a.num_annotators, a.num_labels, a.values.shape[1])
