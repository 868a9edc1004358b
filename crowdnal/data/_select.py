"""Items out of ``Annotations``, and several ``Annotations`` as one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from crowdnal.data._validate import check_rows

if TYPE_CHECKING:
    from crowdnal.data.annotations import Annotations, Vocabulary

SAME_IDS = "read every split with the same annotators= and classes="


def mark_dynamic(value: Any) -> None:
    """``torch._dynamo.maybe_mark_dynamic(value, 0)`` of a tensor, without the second that its import takes.

    Batches differ in nnz; unmarked, torch.compile would learn that by compiling twice.
    """
    if isinstance(value, Tensor):
        value._dynamo_weak_dynamic_indices = {0}  # type: ignore[attr-defined]
        value._has_dynamo_dim_marking = True  # type: ignore[attr-defined]


def cached(a: Annotations, name: str, compute: Callable[[], Tensor]) -> Tensor:
    """Compute a tensor once and keep it, except in a graph or a transform, which must leave nothing in its inputs."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return compute()
    # A tensor made in inference mode could not be saved for a later backward pass.
    with torch.inference_mode(False):
        value = compute()
    mark_dynamic(value)
    setattr(a, name, value)
    return value


def pick(a: Annotations, index: Any) -> Annotations:
    """Items by int, slice, list, integer tensor or boolean mask."""
    size = a.num_items
    if isinstance(index, Tensor) and index.ndim == 0:
        index = index.item()
    if isinstance(index, (int, np.integer)) and not isinstance(index, bool):
        if not -size <= index < size:
            raise IndexError(f"item {index} is out of range for {size} items")
        return span(a, int(index) % size, int(index) % size + 1)
    if isinstance(index, slice):
        start, stop, step = index.indices(size)
        if step == 1:
            return span(a, start, max(start, stop))
        index = list(range(start, stop, step))
    return take(a, check_rows(index, size).to(a.device))


def span(a: Annotations, start: int, stop: int) -> Annotations:
    """Items start to stop. Copies: a view would drag the whole data set along when it is pickled."""
    first, last = int(a.indptr[start]), int(a.indptr[stop])
    weight = None if a.weight is None else a.weight[first:last].clone()
    if a.item_id is None:
        item_id = torch.arange(start, stop, device=a.device)
    else:
        item_id = a.item_id[start:stop].clone()
    indptr = a.indptr[start : stop + 1] - first
    return a._like(indptr, a.annotator[first:last].clone(), a.label[first:last].clone(), weight, item_id)


def take(a: Annotations, rows: Tensor) -> Annotations:
    """The items of these rows, in this order."""
    first = a.indptr[rows]
    counts = a.indptr[rows + 1] - first
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    n = torch.repeat_interleave(first - indptr[:-1], counts)
    n += torch.arange(n.shape[0], device=n.device)
    weight = None if a.weight is None else a.weight[n]
    item_id = rows if a.item_id is None else a.item_id[rows]
    return a._like(indptr, a.annotator[n], a.label[n], weight, item_id)


def select(a: Annotations, mask: Any) -> Annotations:
    """The annotations where mask is true, with every item."""
    mask = torch.as_tensor(mask, device=a.device)
    if mask.dtype != torch.bool or mask.shape != a.annotator.shape:
        raise ValueError(
            f"mask must be boolean [{a.num_annotations}], one value an annotation; got {mask.dtype} {list(mask.shape)}"
        )
    indptr = torch.cat([a.indptr.new_zeros(1), mask.cumsum(0)])[a.indptr]
    weight = None if a.weight is None else a.weight[mask]
    return a._like(indptr, a.annotator[mask], a.label[mask], weight, a.item_id)


def concat(pieces: Sequence[Annotations]) -> Annotations:
    """All items of all pieces, in order, as one.

    Pieces with the same annotator and class ids but other items get one vocabulary with the items of all.

    Raises:
        ValueError: if there is no piece, or pieces differ in R, K, annotator ids or class ids.
    """
    if len(pieces) == 0:
        raise ValueError("pieces is empty; concat needs at least one Annotations")
    head = pieces[0]
    for p, piece in enumerate(pieces):
        if (piece.num_annotators, piece.num_classes) != (head.num_annotators, head.num_classes):
            raise ValueError(
                f"pieces[{p}] has {piece.num_annotators} annotators and {piece.num_classes} classes, "
                f"pieces[0] {head.num_annotators} and {head.num_classes}; {SAME_IDS}"
            )
    vocabulary, item_ids = _merge_ids(pieces)
    ends = torch.cat([piece.indptr for piece in pieces])
    inside = torch.ones(ends.shape[0], dtype=torch.bool)
    inside[torch.tensor([piece.indptr.shape[0] for piece in pieces]).cumsum(0) - 1] = False
    counts = ends.diff()[inside[:-1].to(ends.device)]
    weight = None
    if any(piece.weight is not None for piece in pieces):
        weight = torch.cat(
            [torch.ones(p.label.shape, device=p.device) if p.weight is None else p.weight for p in pieces]
        )
    new = head._like(
        torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        torch.cat([piece.annotator for piece in pieces]),
        torch.cat([piece.label for piece in pieces]),
        weight,
        None if item_ids is None else torch.cat(item_ids),
    )
    new.vocabulary = vocabulary
    return new


def _merge_ids(pieces: Sequence[Annotations]) -> tuple[Vocabulary | None, list[Tensor] | None]:
    ids = [piece.item_id for piece in pieces if piece.item_id is not None]
    item_ids = ids if len(ids) == len(pieces) else None
    head = pieces[0].vocabulary
    if all(piece.vocabulary is head for piece in pieces) and (head is None or item_ids is not None):
        return head, item_ids
    offset: dict[int, int] = {}
    items: list[Hashable] = []
    shifted: list[Tensor] = []
    for p, piece in enumerate(pieces):
        own = piece.vocabulary
        if own is None or head is None:
            return None, item_ids
        if (own.annotators, own.classes) != (head.annotators, head.classes):
            raise ValueError(
                f"the annotator or class ids of pieces[{p}] differ from those of pieces[0], so that equal "
                f"numbers mean different things; {SAME_IDS}"
            )
        if id(own) not in offset:
            offset[id(own)] = len(items)
            items.extend(own.items)
        rows = torch.arange(piece.num_items, device=piece.device) if piece.item_id is None else piece.item_id
        shifted.append(rows + offset[id(own)])
    return None if head is None else replace(head, items=tuple(items)), shifted
