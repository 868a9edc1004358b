"""Hugging Face accelerate: batches that its main process can cut and send (``dispatch_batches=True``).

With a map-style data set, or ``dispatch_batches=False``, nothing of this is needed: Annotations go through ``prepare``
as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crowdnal.data import Annotations, collate


class Padded(NamedTuple):
    """Annotations as tensors with a row per item, which can be cut, joined and sent.

    Attributes:
        annotator: ``[B, M]``, M the most labels of an item; -1 behind the last.
        label: ``[B, M]``.
        weight: ``[B, M]``, 1 where there are no weights.
        item_id: ``[B]``, -1 where nobody said.
    """

    annotator: Tensor
    label: Tensor
    weight: Tensor
    item_id: Tensor

    @classmethod
    def of(cls, annotations: Annotations, most: int) -> Padded:
        """The annotations, no item with more than ``most``."""
        a = annotations
        if len(a) and int(a.counts.max()) > most:
            i = int(a.counts.argmax())
            raise ValueError(f"item {i} of the batch has {int(a.counts[i])} labels, more than most={most}: raise it")
        place = torch.arange(a.num_annotations) - a.indptr[a.item]
        tables = []
        for values, fill in ((a.annotator, -1), (a.label, -1), (a.weight, 1.0)):
            values = torch.ones(a.num_annotations) if values is None else values
            tables.append(torch.full((len(a), most), fill, dtype=values.dtype).index_put((a.item, place), values))
        annotator, label, weight = tables
        return cls(annotator, label, weight, torch.full((len(a),), -1) if a.item_id is None else a.item_id)

    def annotations(self, num_annotators: int, num_classes: int) -> Annotations:
        """What it was made of, without the ids of a vocabulary."""
        kept = self.annotator >= 0
        counts = kept.sum(1)
        return Annotations(
            torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
            self.annotator[kept],
            self.label[kept],
            num_annotators=num_annotators,
            num_classes=num_classes,
            weight=self.weight[kept],
            item_id=None if bool((self.item_id < 0).any()) else self.item_id,
        )


class PaddedCollate:
    """:func:`crowdnal.collate` of ``(image, annotations)``, the annotations as :class:`Padded`.

    Args:
        most: the most labels that an item has; every batch has room for them.
    """

    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, samples: Sequence[Any]) -> tuple[Any, Padded]:
        """Images and annotations of a batch."""
        images, annotations = collate(samples)
        return images, Padded.of(annotations, self.most)
