"""The matrices of some annotators: fake."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from crowdnal import reference
from crowdnal.ops._declare import declare


@declare(reference.select, shapes="confusion:RCK", matrices=("confusion",), autocast=False)  # which keeps the dtype
def select(a: Any) -> Tensor:
    """[T, C, K]."""
    return a.confusion.new_empty(a.annotators.shape[0], *a.confusion.shape[1:])
