"""Which row of the training set an item of a batch is."""

from __future__ import annotations

import torch
from torch import Tensor


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
