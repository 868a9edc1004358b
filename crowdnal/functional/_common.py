"""What the op families share: index tensors, dtypes, reductions, and the rules of `vmap`."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from crowdnal.annotations import Annotations

Index = tuple[Tensor, Tensor, Tensor, Tensor]
"""indptr [B + 1], item [nnz], annotator [nnz], order [nnz]: what every op takes."""

Reduction = Literal["mean", "sum", "none", "item_mean"]


def index_of(annotations: Annotations) -> Index:
    """The index tensors of a batch of annotations."""
    return annotations.indptr, annotations.item, annotations.annotator, annotations.order


def promote(*tensors: Tensor | None) -> list[Any]:
    """The tensors in one floating dtype, at least float32 (None stays None)."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype) for tensor in tensors]


def check_shape(name: str, tensor: Tensor, *sizes: int, meaning: str) -> None:
    """Raises ValueError unless `tensor` has exactly these sizes; `meaning` reads like "[num_items, num_classes]"."""
    if tuple(tensor.shape) != sizes:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {meaning} = {sizes}")


def check_confusion(confusion: Tensor, annotations: Annotations, label_dim: int) -> None:
    """Raises ValueError unless confusion is [R, ., .] with the label set of the annotations on `label_dim`."""
    if confusion.dim() != 3 or confusion.shape[0] != annotations.num_annotators:
        raise ValueError(
            f"confusion has shape {tuple(confusion.shape)}, but the annotations have "
            f"num_annotators={annotations.num_annotators}: one matrix an annotator is needed"
        )
    if confusion.shape[label_dim] != annotations.num_classes:
        raise ValueError(
            f"confusion has {confusion.shape[label_dim]} observed labels (dimension {label_dim} of shape "
            f"{tuple(confusion.shape)}), but the annotations have num_classes={annotations.num_classes}"
        )


def reduction_weights(
    annotations: Annotations, weight: Tensor | None, reduction: Reduction, dtype: torch.dtype
) -> tuple[Tensor | None, bool]:
    """(weight, mean) of the ops such that their `loss` is the asked reduction; weight is [nnz] or None."""
    if weight is None:
        weight = annotations.weight
    if weight is not None:
        check_shape("weight", weight, annotations.num_annotations, meaning="[num_annotations]")
        weight = weight.to(dtype)
    if reduction in ("sum", "none"):
        return weight, False
    if reduction == "mean":
        return (None, True) if weight is None else (_safe_divide(weight, weight.sum()), False)
    if reduction == "item_mean":
        each = torch.ones_like(annotations.label, dtype=dtype) if weight is None else weight
        item_total = sum_rows(each, annotations)
        num_items = (item_total > 0).sum().clamp(min=1)
        return _safe_divide(each, item_total[annotations.item]) / num_items, False
    raise ValueError(f"reduction={reduction!r} is not one of 'mean', 'sum', 'none', 'item_mean'")


def _safe_divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 where the denominator is 0."""
    return torch.where(denominator > 0, numerator / torch.where(denominator > 0, denominator, 1.0), 0.0)


def sum_rows(values: Tensor, annotations: Annotations) -> Tensor:
    """values [nnz] summed over each item's annotations, [B], in a fixed order."""
    from crowdnal.functional.mix import sum_by_item

    return sum_by_item(values.unsqueeze(1), index_of(annotations)).squeeze(1)


def to_front(tensor: Tensor | None, dim: int | None, batch_size: int) -> Any:
    """A tensor of a `vmap` call with the mapped dimension in front, expanded where it is not mapped."""
    if tensor is None:
        return None
    return tensor.expand(batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def fold_index(index: tuple[Tensor, ...], dims: tuple[int | None, ...], batch_size: int, num_annotators: int) -> Index:
    """The index of `batch_size` problems laid side by side: items, annotators and annotations get offsets.

    `num_annotators` = 0 leaves annotators as they are (the problems share the matrices that are only read).
    """
    indptr, item, annotator, order = (to_front(t, d, batch_size) for t, d in zip(index, dims, strict=True))
    num_items, nnz = indptr.shape[1] - 1, annotator.shape[1]
    problem = torch.arange(batch_size, device=indptr.device).unsqueeze(1)
    ends = (indptr[:, 1:] + problem * nnz).flatten()
    return (
        torch.cat([ends.new_zeros(1), ends]),
        (item + problem * num_items).flatten(),
        (annotator + problem * num_annotators).flatten(),
        (order + problem * nnz).flatten(),
    )


def unfused_vmap(unfused: Any, info: Any, dims: Any, *arguments: Any) -> Any:
    """Rule of a fused op: its unfused form, whose primitives have rules of their own."""
    out = torch.vmap(unfused, in_dims=tuple(dims))(*arguments)
    return out, (0,) * len(out)
