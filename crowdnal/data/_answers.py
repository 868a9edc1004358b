"""Answers before they are tied to items: columns numbered, to the fields of an ``Annotations``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from crowdnal.data._columns import Column
from crowdnal.data._fields import Fields
from crowdnal.data._labels import encode
from crowdnal.data._vocabulary import Array, Ids, Vocabulary


@dataclass(frozen=True)
class Answers:
    """One label of a worker for a task per entry.

    Attributes:
        task: column whose values are all tasks, also those without a label, in order.
        worker: column whose values are all workers.
        label: column of the labels, none missing.
        place: answer n in words, for a message about its "task", "worker" or "label".
        written: whether it comes from a file, so that ids given as 3 and "3" are one.
        weight: of each answer.
        unsure: labels that are no classes and come last.
        first: where value u of "task" or "worker" first stands, also in a row without a label; in words.
        missing: what was read as no label, "" for empty cells, and how often.
    """

    task: Column
    worker: Column
    label: Column
    place: Callable[[str, int], str]
    written: bool
    weight: Array | None = None
    unsure: tuple[Hashable, ...] = ()
    missing: Mapping[str, int] = field(default_factory=dict)
    first: Callable[[str, int], str] | None = None

    def fields(self, items: Ids, annotators: Ids, classes: Ids) -> Fields:
        """In CSR form by item, the ids those given, or those found.

        Raises:
            ValueError: an id that is not among those given, naming the row.
        """
        given = {
            "items": (self.task, items, "task"),
            "annotators": (self.worker, annotators, "worker"),
            "classes": (self.label, classes, "label"),
        }
        (item, item_ids), (annotator, annotator_ids), (label, class_ids) = (
            encode(
                column,
                wanted,
                name,
                natural=name != "items",
                place=lambda n, what=what: self.place(what, n),  # type: ignore[misc]
                written=self.written,
                last=self.unsure if name == "classes" else (),
                first=None if self.first is None else partial(self.first, what),
            )
            for name, (column, wanted, what) in given.items()
        )
        weight = self.weight
        indptr = np.zeros(len(item_ids) + 1, dtype=np.int64)
        np.cumsum(np.bincount(item, minlength=len(item_ids)), out=indptr[1:])
        if (item[1:] < item[:-1]).any():
            # A stable argsort by a plain sort of distinct keys, which numpy vectorises.
            bits = len(item).bit_length()
            order = item << bits
            del item
            order |= np.arange(len(order))
            order.sort()
            order &= (1 << bits) - 1
            annotator = annotator[order]
            label = label[order]
            weight = None if weight is None else weight[order]
        return Fields(
            num_annotators=len(annotator_ids),
            num_classes=len(class_ids),
            indptr=torch.from_numpy(indptr),
            annotator=torch.from_numpy(annotator),
            label=torch.from_numpy(label),
            weight=None if weight is None else torch.from_numpy(weight).to(torch.get_default_dtype()),
            item_id=torch.arange(len(item_ids)),
            vocabulary=Vocabulary(item_ids, annotator_ids, class_ids),
        )
