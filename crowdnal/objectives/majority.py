"""Majority voting: aggregate the labels of an item, train on the aggregate. The baseline of every paper."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor
from typing_extensions import override

from crowdnal.data import Annotations
from crowdnal.objectives._bases.base import Objective, ObjectiveOptions
from crowdnal.objectives._bases.batch import Batch
from crowdnal.objectives._bases.targets import most_probable
from crowdnal.objectives._registry import register


@register("majority-vote", link="cross-entropy with the most frequent label")
class MajorityVote(Objective):
    """Cross-entropy against the majority of an item's labels, or against their proportions (``soft=True``).

    Ties go to the lowest class index. Weights count as that many votes. The unit is the item: ``"mean"`` (the
    same as ``"item_mean"`` and ``"per_item"``) averages over the items that have labels (with a weight above 0),
    ``"none"`` gives ``[B]`` with 0 for an item without labels.

    Labels that are no class (``num_labels`` above ``num_classes``: "unsure") are no votes.

    It has no parameters and takes every annotator to be right: ``log_likelihood`` is the classifier's own log
    p of each label, and ``posterior`` its own probabilities.

    Args:
        soft: proportions instead of the majority.
    """

    models_annotators = False
    counts_items = True
    cross_entropy_with = "targets"

    def __init__(
        self, num_classes: int, num_annotators: int, *, soft: bool = False, **common: Unpack[ObjectiveOptions]
    ) -> None:
        super().__init__(num_classes, num_annotators, **common)
        self.require_a_label_per_class(type(self).__name__)
        self.soft = soft

    def targets(self, annotations: Annotations, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[B, C]`` the vote of each item as a distribution; all zero where an item has no labels."""
        votes = annotations.votes(weighted=True).to(dtype)[:, : self.num_classes]
        total = votes.sum(-1, keepdim=True)
        if self.soft:
            return votes / total.where(total > 0, 1.0)
        return most_probable(votes) * (total > 0)

    @override
    def confusion(self) -> Tensor:
        """Majority voting has none."""
        raise RuntimeError(
            f"{type(self).__name__} does not model annotators: estimate their confusions with "
            "crowdnal.metrics.empirical_confusion(probabilities, annotations)"
        )

    def _loss(self, batch: Batch) -> Tensor:
        targets = self.targets(batch.annotations, batch.logits.dtype)
        return self.cross_entropy.of_targets(batch.logits, targets, batch.reduction)

    def _log_likelihood(self, batch: Batch) -> Tensor:
        annotations, last = batch.annotations, self.num_classes - 1
        found = batch.logits.log_softmax(-1)[annotations.item, annotations.label.clamp(max=last)]
        return found if self.num_labels == self.num_classes else found.where(annotations.label <= last, 0.0)

    def _units(self, annotations: Annotations) -> Tensor:
        return self.cross_entropy.units_of(self.targets(annotations)).sum()

    def _posterior(self, batch: Batch) -> Tensor:
        return batch.logits.softmax(-1)


@register("soft-majority-vote", link="cross-entropy with the distribution of votes")
class SoftMajorityVote(MajorityVote):
    """:class:`MajorityVote` against the (weighted) proportions of an item's labels."""

    def __init__(self, num_classes: int, num_annotators: int, **common: Unpack[ObjectiveOptions]) -> None:
        super().__init__(num_classes, num_annotators, soft=True, **common)
