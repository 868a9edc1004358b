"""Sums and rows by item and by annotator, in a fixed order, natively: what modules and objectives build on."""

from __future__ import annotations

import torch
from torch import Tensor

from crowdnal.data import Annotations
from crowdnal.functional._autograd._function import Index, check_shape, index_of
from crowdnal.functional._autograd.mix import mix as mix_indexed
from crowdnal.functional._autograd.mix import mix_annotators
from crowdnal.reference import compute_dtype

__all__ = [
    "Index",
    "annotation_weight",
    "distinct",
    "finite",
    "gather_rows",
    "index_of",
    "mix_indexed",
    "mix_rows",
    "row_products",
    "rows_of_items",
    "scatter_rows",
    "sum_by_item",
    "sum_rows",
]


def annotation_weight(annotations: Annotations, weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The weight [nnz] of a call, by default the annotations' own; None means 1 everywhere."""
    if weight is None:
        weight = annotations.weight
    if weight is None:
        return None
    check_shape("weight", weight, annotations.num_annotations, meaning="[num_annotations]")
    return weight.to(dtype)


def _rows(key: Tensor, order: Tensor) -> Index:
    """The index of rows that stand alone, each with its key for an annotator."""
    nnz = key.shape[0]
    return torch.arange(nnz + 1, device=key.device), torch.arange(nnz, device=key.device), key, order, None


def mix_rows(rows: Tensor, confusion: Tensor, key: Tensor, order: Tensor) -> Tensor:
    """rows_n confusion[key_n] for rows [nnz, C] (one per annotation), key [nnz] and its stable sort: [nnz, K]."""
    return mix_indexed(rows, confusion, _rows(key, order))


def gather_rows(table: Tensor, key: Tensor, order: Tensor) -> Tensor:
    """table[key] for table [G, D], key [nnz] and its stable sort; the gradient is a native, ordered sum."""
    ones = table.new_ones(key.shape[0], 1, dtype=compute_dtype(table.dtype))
    return mix_rows(ones, table.unsqueeze(1), key, order)


def scatter_rows(values: Tensor, key: Tensor, order: Tensor, num_rows: int) -> Tensor:
    """Adjoint of `gather_rows`: [G, D], row g the sum of values [nnz, D] whose key is g."""
    return mix_annotators(values.new_ones(key.shape[0], 1), values, _rows(key, order), num_rows).squeeze(1)


def labels_given(annotations: Annotations) -> Tensor:
    """``[R]`` how many labels each annotator gave, by their weights."""
    weight = annotation_weight(annotations, None, torch.float32)
    ones = torch.ones_like(annotations.annotator, dtype=torch.float32) if weight is None else weight
    count = annotations.num_annotators
    return scatter_rows(ones.unsqueeze(1), annotations.annotator, annotations.order, count).squeeze(1)


def distinct(key: Tensor, order: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Each of the keys [nnz], below num_keys, once: values [min(nnz, num_keys)] in order, and the slot [nnz] of each.

    Slots that are not in use hold 0: no shape depends on values, so that nothing waits for a device.
    """
    ordered = key[order]
    ordered_slot = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).cumsum(0)])
    values = ordered.new_zeros(min(len(ordered), num_keys)).scatter(0, ordered_slot, ordered)
    return values, torch.empty_like(ordered_slot).scatter(0, order, ordered_slot)


def sum_by_item(values: Tensor, index: Index) -> Tensor:
    """Sum of values [nnz, D] over each item's annotations, [B, D]."""
    indptr, item = index[:2]
    return scatter_rows(values, item, torch.arange(item.shape[0], device=item.device), indptr.shape[0] - 1)


def sum_rows(values: Tensor, annotations: Annotations) -> Tensor:
    """values [nnz] summed over each item's annotations, [B], in a fixed order."""
    return sum_by_item(values.unsqueeze(1), index_of(annotations)).squeeze(1)


def rows_of_items(values: Tensor, annotations: Annotations) -> Tensor:
    """The value [B] of each annotation's item, [nnz]; the gradient is summed in a fixed order."""
    order = torch.arange(annotations.num_annotations, device=values.device)
    return gather_rows(values.unsqueeze(1), annotations.item, order).squeeze(1)


def finite(log_confusion: Tensor) -> Tensor:
    """0 for -inf: no weight of an impossible label changes anything."""
    return log_confusion.masked_fill(log_confusion.isneginf(), 0.0)


def row_products(values: Tensor, log_confusion: Tensor, index: Index, label: Tensor) -> Tensor:
    """sum_k values[item_n, k] log_confusion[annotator_n, label_n, k], [nnz]; -inf counts as 0."""
    _, item, annotator, *_ = index
    key = annotator * log_confusion.shape[1] + label
    rows = gather_rows(finite(log_confusion).reshape(-1, log_confusion.shape[2]), key, torch.argsort(key, stable=True))
    return (gather_rows(values, item, torch.arange(item.shape[0], device=item.device)) * rows).sum(1)
