"""A pass of EM: fake."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from crowdnal import reference
from crowdnal.ops._declare import declare


@declare(reference.em_step, shapes="log_prior:1C log_confusion:RKC weight:N", matrices=("log_confusion",))
def em_step(a: Any) -> tuple[Tensor, ...]:
    """Loss [], posterior [N, C], counts [R, K, C], totals [C]."""
    like, (_, _, classes) = a.log_confusion, a.log_confusion.shape
    sizes = (), (a.num_items, classes), like.shape, (classes,)
    return tuple(reference.new_empty(like, *size) for size in sizes)
