"""Annotations of mixed items (Mixup, CutMix)."""

from __future__ import annotations

import torch
from torch import Tensor

from crowdnal.data import Annotations, concat


def mixed(annotations: Annotations, rows: Tensor, share: Tensor) -> Annotations:
    """Item i with its own labels, times ``share[i]``, and then those of item ``rows[i]``, times the rest.

    Args:
        annotations: of B items.
        rows: ``[B]``.
        share: ``[B]``, 0 to 1.

    Returns:
        Annotations whose items are nobody's: without ``item_id`` and ids.
    """
    size = len(annotations)
    both = concat([annotations, annotations[rows]])
    weight = both.weight if both.weight is not None else torch.ones_like(both.label, dtype=torch.float32)
    weight = weight * torch.cat([share, 1 - share]).to(weight)[both.item]
    item = both.item % max(size, 1)
    order = torch.argsort(item, stable=True)
    counts = both.counts[:size] + both.counts[size:]
    return Annotations(
        torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        both.annotator[order],
        both.label[order],
        num_annotators=both.num_annotators,
        num_classes=both.num_classes,
        weight=weight[order],
    )
