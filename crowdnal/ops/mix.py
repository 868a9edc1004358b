"""The primitives, each other's adjoints: fakes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from crowdnal import reference
from crowdnal.ops._declare import declare


@declare(reference.mix, shapes="scores:BC confusion:RCK", matrices=("confusion",))
def mix(a: Any) -> Tensor:
    """[nnz, K]."""
    return a.scores.new_empty(a.nnz, a.confusion.shape[2])


@declare(reference.mix_items, shapes="grad:NK confusion:RCK", matrices=("confusion",))
def mix_items(a: Any) -> Tensor:
    """[B, C]."""
    return a.grad.new_empty(a.num_items, a.confusion.shape[1])


@declare(
    reference.mix_annotators,
    shapes="scores:BC grad:NK",
)
def mix_annotators(a: Any) -> Tensor:
    """[R, C, K]."""
    return a.scores.new_empty(a.num_annotators, a.scores.shape[1], a.grad.shape[1])
