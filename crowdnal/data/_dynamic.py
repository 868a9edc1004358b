"""What ``torch.compile`` is told of sizes that differ by batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def mark_dynamic(value: Any) -> None:
    """``torch._dynamo.maybe_mark_dynamic(value, 0)`` of a tensor, without the second that its import takes.

    Batches differ in nnz; unmarked, torch.compile would learn that by compiling twice.
    """
    if isinstance(value, Tensor):
        value._dynamo_weak_dynamic_indices = {0}  # type: ignore[attr-defined]
        value._has_dynamo_dim_marking = True  # type: ignore[attr-defined]


def mark_batch(batch: Any) -> None:
    """Tells ``torch.compile`` that the first size of the tensors in tuples, lists and mappings differs by batch."""
    if isinstance(batch, Tensor) and batch.dim() > 0:
        mark_dynamic(batch)
    elif isinstance(batch, (tuple, list, Mapping)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            mark_batch(part)
