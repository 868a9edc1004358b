"""Which row of the training set an item of a batch is."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from crowdnal.data import Annotations, Vocabulary

GIVE = (
    "take batches of Annotations (annotations[rows], or a CrowdDataset), which know their items, or say which they are "
    "where a batch is read: items=[...], the ids or row numbers of the training set"
)
"""What an error says where nobody said whose annotations a batch has."""


class ItemNumbers:
    """``item_id`` of batches as the training set numbers its items: by their ids, where a batch has ids of its own.

    A batch that is read by itself (in a collate function over a stream) numbers its items from 0; what it shares with
    the training set are the ids. Where the training set has none, the ids of a batch are its row numbers.

    Args:
        vocabulary: of the training set.
    """

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self.vocabulary = vocabulary
        self._number: dict[Hashable, int] | None = None

    def of(self, annotations: Annotations) -> Tensor | None:
        """``[B]``, or None where nobody said.

        Raises:
            ValueError: naming the item whose id the training set does not have.
        """
        theirs = annotations.vocabulary
        if annotations.item_id is None or theirs is None or theirs is self.vocabulary:
            return annotations.item_id
        own = None if self.vocabulary is None else self.vocabulary.items
        if theirs.items == own:
            return annotations.item_id
        if own is not None and self._number is None:
            self._number = {item: number for number, item in enumerate(own)}
        numbers = []
        for i, row in enumerate(annotations.item_id.tolist()):
            item = theirs.items[row]
            if self._number is not None:
                number = self._number.get(item)
            else:
                number = item if isinstance(item, int) and item >= 0 else None
            if number is None:
                known = "has no ids (read it with items=)" if own is None else f"has {len(own)} others"
                raise ValueError(f"item {i} of the batch is {item!r}, but the training set {known}")
            numbers.append(number)
        return torch.tensor(numbers, dtype=torch.int64, device=annotations.device)


def row_table(item_id: Tensor | None) -> Tensor | None:
    """``[max + 1]`` row of each item_id of the training set, -1 for ids it does not have; None where they are the rows.

    Raises:
        ValueError: naming an item that occurs more than once.
    """
    if item_id is None or torch.equal(item_id, torch.arange(len(item_id), device=item_id.device)):
        return None
    size = int(item_id.max()) + 1
    repeated = torch.bincount(item_id, minlength=size) > 1
    if bool(repeated.any()):
        raise ValueError(
            f"item_id {int(repeated.nonzero()[0, 0])} occurs more than once in annotations: the training set has each "
            "item once, with all its labels"
        )
    table = item_id.new_full((size,), -1)
    table[item_id] = torch.arange(len(item_id), device=item_id.device)
    return table


def item_rows(item_id: Tensor, table: Tensor | None, items: int) -> Tensor:
    """``[B]`` rows, below ``items``. Values on a GPU are not read, which would wait for it.

    Raises:
        ValueError: naming the item that the training set does not have.
    """
    check = item_id.device.type == "cpu" and not torch.compiler.is_compiling()
    if check:
        _refuse(item_id, item_id >= (items if table is None else len(table)), items)
    if table is None:
        return item_id
    rows = table[item_id]
    if check:
        _refuse(item_id, rows < 0, items)
    return rows


def _refuse(item_id: Tensor, unknown: Tensor, items: int) -> None:
    if bool(unknown.any()):
        i = int(unknown.nonzero()[0, 0])
        raise ValueError(
            f"item_id of item {i} is {int(item_id[i])}, which is none of the {items} items of the training set that "
            "on_train_start was given: give it all of them"
        )
