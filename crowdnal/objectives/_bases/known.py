"""Known true classes of some items, beside the annotators' labels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from crowdnal.data import Annotations
from crowdnal.functional import Reduction
from crowdnal.objectives._bases.item_rows import GIVE, ItemNumbers, item_rows, row_table


class KnownClasses:
    """What is known of the training set, and what it adds to a loss.

    Args:
        classes: ``[N]``, -1 where unknown.
        weight: labels of annotators that a known class counts.
        whole: the training set; None: items are the rows of ``classes``.
    """

    def __init__(self, classes: Tensor, weight: float, whole: Annotations | None) -> None:
        self.classes, self.weight = classes, weight
        self.numbers = ItemNumbers(None if whole is None else whole.vocabulary)
        self.row_of = row_table(None if whole is None or whole.item_id is None else whole.item_id.cpu())

    def of(self, annotations: Annotations) -> Tensor:
        """``[B]`` classes of a batch, -1 where unknown.

        Raises:
            ValueError: nobody said which items these are.
        """
        device = annotations.device
        if self.classes.device != device:
            self.classes = self.classes.to(device)
            self.row_of = None if self.row_of is None else self.row_of.to(device)
        item_id, size = self.numbers.of(annotations), len(self.classes)
        if item_id is not None:
            return self.classes[item_rows(item_id, self.row_of, size)]
        if len(annotations) == size:
            return self.classes
        raise ValueError(f"annotations have no item_id and {len(annotations)} items, but gold has {size}: {GIVE}")

    def units(self, annotations: Annotations, class_weight: Tensor | None) -> Tensor:
        """Scalar: what the known classes of a batch count in a mean, with weights ``[C]`` of classes."""
        return self.weight * _total(self.of(annotations), class_weight)

    def join(
        self,
        loss: Tensor,
        units: Tensor,
        logits: Tensor,
        annotations: Annotations,
        reduction: Reduction,
        class_weight: Tensor | None,
    ) -> Tensor:
        """The loss of the annotations, which are ``units``, with the cross-entropy of the known classes."""
        known = self.of(annotations)
        counted = known >= 0
        logits = logits.where(counted.unsqueeze(1), 0.0)  # what does not count may be anything
        own = self.weight * F.cross_entropy(logits, known, class_weight, ignore_index=-1, reduction="sum")
        if reduction == "sum":
            return loss + own
        total = units.to(own.dtype) + self.weight * _total(known, class_weight)
        return (loss * units + own) / total.where(total > 0, 1.0)

    def correct(self, posterior: Tensor, annotations: Annotations) -> Tensor:
        """``[B, C]``: certain where the class is known."""
        known = self.of(annotations)
        certain = F.one_hot(known.clamp(min=0), posterior.shape[1]).to(posterior)
        return torch.where((known >= 0).unsqueeze(1), certain, posterior)


def _total(known: Tensor, class_weight: Tensor | None) -> Tensor:
    counted = known >= 0
    return counted.sum() if class_weight is None else class_weight[known.clamp(min=0)].where(counted, 0.0).sum()
