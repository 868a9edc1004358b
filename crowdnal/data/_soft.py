"""Answers that are distributions over the classes: arrays ``[N, R, K]``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from crowdnal.data._dense import ids_of
from crowdnal.data._fields import Fields
from crowdnal.data._labels import markers
from crowdnal.data._vocabulary import Ids, Vocabulary, distinct, is_number


def soft_fields(data: Any, num_classes: int | None, missing: Any, items: Ids, annotators: Ids, classes: Ids) -> Fields:
    """Each class with a probability above 0 as a label of that weight; see ``Annotations.from_dense``.

    Raises:
        ValueError: for another number of classes, or naming the item, the annotator and the class.
    """
    table = torch.as_tensor(np.ma.filled(data, np.nan) if isinstance(data, np.ma.MaskedArray) else data).detach()
    if table.is_complex() or table.is_meta:
        raise ValueError(f"matrix must hold probabilities, got {table.dtype} on {table.device}")
    table = table if table.dtype in (torch.float32, torch.float64) else table.to(torch.get_default_dtype())
    num_items, num_annotators, size = table.shape
    names = None if classes is None else distinct(classes, "classes")
    for given in (num_classes, None if names is None else len(names)):
        if given not in (None, size):
            shape = list(table.shape)
            raise ValueError(f"matrix is {shape}, {size} probabilities an answer, but there are {given} classes")
    row_names, column_names = (
        None if wanted is None else tuple(ids_of(None, wanted, count, name))
        for wanted, count, name in ((items, num_items, "items"), (annotators, num_annotators, "annotators"))
    )
    none = table.isnan() | sum((table == m for m in _numbers(missing)), torch.zeros_like(table, dtype=torch.bool))
    answered = ~none.all(-1)
    bad = answered.unsqueeze(-1) & ~((table >= 0) & (table <= 1))
    if bool(bad.any()):
        i, r, k = bad.nonzero()[0].tolist()
        raise ValueError(
            f"matrix[{i}, {r}, {k}] is {table[i, r, k].item():g}: probabilities are numbers from 0 to 1, all -1 or NaN "
            "where there is no answer"
        )
    item, annotator, label = (answered.unsqueeze(-1) & (table > 0)).nonzero().unbind(1)
    counts = torch.bincount(item, minlength=num_items)
    named = (row_names, column_names, names) != (None, None, None)
    vocabulary = None
    if named:
        vocabulary = Vocabulary(
            *(
                tuple(range(count)) if found is None else found
                for found, count in ((row_names, num_items), (column_names, num_annotators), (names, size))
            )
        )
    return Fields(
        num_annotators=num_annotators,
        num_classes=size,
        indptr=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        annotator=annotator,
        label=label,
        weight=table[item, annotator, label],
        item_id=None if row_names is None else torch.arange(num_items, device=table.device),
        vocabulary=vocabulary,
    )


def is_soft(data: Any) -> bool:
    """Whether data has three dimensions, as an array or as lists."""
    if isinstance(data, list):
        cell: Any = data
        for _ in range(2):
            cell = cell[0] if isinstance(cell, list) and cell else None
        return isinstance(cell, list)
    return isinstance(data, (Tensor, np.ndarray)) and data.ndim == 3


def _numbers(missing: Any) -> list[Any]:
    return [marker for marker in [-1, *markers(missing)] if is_number(marker)]
