"""Items out of the fields of ``Annotations``, and several fields as one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crowdnal.data._fields import Fields
from crowdnal.data._validate import check_rows
from crowdnal.data._vocabulary import Vocabulary

SAME_IDS = "read every split with the same annotators= and classes="


def pick(a: Fields, index: Any) -> Fields:
    """Items by int, slice, list, integer tensor or boolean mask."""
    size = a.indptr.shape[0] - 1
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
    return take(a, check_rows(index, size).to(a.indptr.device))


def span(a: Fields, start: int, stop: int) -> Fields:
    """Items start to stop. Copies: a view would drag the whole data set along when it is pickled."""
    first, last = int(a.indptr[start]), int(a.indptr[stop])
    weight = None if a.weight is None else a.weight[first:last].clone()
    if a.item_id is None:
        item_id = torch.arange(start, stop, device=a.indptr.device)
    else:
        item_id = a.item_id[start:stop].clone()
    indptr = a.indptr[start : stop + 1] - first
    return a.over(indptr, a.annotator[first:last].clone(), a.label[first:last].clone(), weight, item_id)


def take(a: Fields, rows: Tensor) -> Fields:
    """The items of these rows, in this order."""
    first = a.indptr[rows]
    counts = a.indptr[rows + 1] - first
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    n = torch.repeat_interleave(first - indptr[:-1], counts)
    n += torch.arange(n.shape[0], device=n.device)
    weight = None if a.weight is None else a.weight[n]
    item_id = rows if a.item_id is None else a.item_id[rows]
    return a.over(indptr, a.annotator[n], a.label[n], weight, item_id)


def select(a: Fields, mask: Any) -> Fields:
    """The annotations where mask is true, with every item."""
    wanted = f"mask must be boolean [{a.annotator.shape[0]}], one value per annotation"
    try:
        mask = torch.as_tensor(mask, device=a.indptr.device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{wanted}; got {mask!r}") from None
    if mask.dtype != torch.bool or mask.shape != a.annotator.shape:
        raise ValueError(f"{wanted}; got {mask.dtype} {list(mask.shape)}")
    indptr = torch.cat([a.indptr.new_zeros(1), mask.cumsum(0)])[a.indptr]
    weight = None if a.weight is None else a.weight[mask]
    return a.over(indptr, a.annotator[mask], a.label[mask], weight, a.item_id)


def concat(pieces: Sequence[Fields]) -> Fields:
    """All items of all pieces, in order, as one; see :func:`crowdnal.concat`."""
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
            [torch.ones(p.label.shape, device=p.label.device) if p.weight is None else p.weight for p in pieces]
        )
    both = head.over(
        torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        torch.cat([piece.annotator for piece in pieces]),
        torch.cat([piece.label for piece in pieces]),
        weight,
        None if item_ids is None else torch.cat(item_ids),
    )
    return both._replace(vocabulary=vocabulary)


def _merge_ids(pieces: Sequence[Fields]) -> tuple[Vocabulary | None, list[Tensor] | None]:
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
        rows = piece.item_id
        if rows is None:
            rows = torch.arange(piece.indptr.shape[0] - 1, device=piece.indptr.device)
        shifted.append(rows + offset[id(own)])
    unknown = not ids and len(offset) == len(pieces)
    return None if head is None else replace(head, items=tuple(items)), None if unknown else shifted
