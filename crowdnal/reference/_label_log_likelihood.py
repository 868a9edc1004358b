"""Log-likelihood of an item's labels under each true class, and its adjoint: expected counts of class and label."""

from __future__ import annotations

import torch
from torch import Tensor

from crowdnal.reference._terms import widen


def label_log_likelihood(
    log_confusion: Tensor,
    weight: Tensor | None,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    plan: Tensor | None,
    label: Tensor,
) -> Tensor:
    """out[i, k] = sum over annotations n of item i of w_n log_confusion[annotator_n, label_n, k]; returns [B, C].

    A weight of 0 adds nothing, also where the row is not finite.
    """
    rows = widen(log_confusion[annotator, label])
    if weight is not None:
        factor = weight.unsqueeze(1)
        rows = torch.where((factor == 0) & ~rows.isfinite(), 0.0, rows) * factor
    return rows.new_zeros(indptr.shape[0] - 1, rows.shape[1]).index_add(0, item, rows)


def label_counts(
    values: Tensor,
    weight: Tensor | None,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    plan: Tensor | None,
    label: Tensor,
    num_annotators: int,
    num_labels: int,
) -> Tensor:
    """out[r, y, k] = sum over annotations n of r with label y of w_n values[item_n, k]; returns [R, K, C]."""
    rows = values[item] if weight is None else values[item] * weight.unsqueeze(1)
    table = rows.new_zeros(num_annotators * num_labels, values.shape[1])
    return table.index_add(0, annotator * num_labels + label, rows).reshape(num_annotators, num_labels, values.shape[1])
