"""Majority voting: aggregate the labels of an item, train on the aggregate. The baseline of every paper."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from crowdnal.data import Annotations
from crowdnal.functional import Reduction
from crowdnal.objectives._bases.base import Objective
from crowdnal.objectives._bases.targets import most_probable, target_cross_entropy


class MajorityVote(Objective):
    """Cross-entropy against the majority of an item's labels, or against their proportions (``soft=True``).

    Ties go to the lowest class index. Weights count as that many votes. The unit is the item: ``"mean"`` (the
    same as ``"item_mean"``) averages over the items that have labels (with a weight above 0), ``"none"``
    gives ``[B]`` with 0 for an item without labels.

    It has no parameters and takes every annotator to be right: ``log_likelihood`` is the classifier's own log
    p of each label, and ``posterior`` its own probabilities.
    """

    name: ClassVar[str] = "majority-vote"
    models_annotators = False

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        num_labels: int | None = None,
        reduction: Reduction = "mean",
        soft: bool = False,
    ) -> None:
        super().__init__(num_classes, num_annotators, num_labels=num_labels, reduction=reduction)
        self._needs_square(type(self).__name__)
        self.soft = soft

    def targets(self, annotations: Annotations, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[B, C]`` the vote of each item as a distribution; all zero where an item has no labels."""
        votes = annotations.votes(weighted=True).to(dtype)
        total = votes.sum(-1, keepdim=True)
        if self.soft:
            return votes / total.where(total > 0, 1.0)
        return most_probable(votes) * (total > 0)

    def confusion(self) -> Tensor:
        """Majority voting has none."""
        raise RuntimeError(
            f"{type(self).__name__} does not model annotators: estimate their confusions with "
            "crowdnal.metrics.empirical_confusion(probabilities, annotations)"
        )

    def _loss(self, logits: Tensor, annotations: Annotations, features: Tensor | None) -> Tensor:
        return target_cross_entropy(logits, self.targets(annotations, logits.dtype), self.reduction)

    def _log_likelihood(self, logits: Tensor, annotations: Annotations, features: Tensor | None) -> Tensor:
        return logits.log_softmax(-1)[annotations.item, annotations.label]

    def _posterior(self, logits: Tensor, annotations: Annotations, features: Tensor | None) -> Tensor:
        return logits.softmax(-1)

    def extra_repr(self) -> str:
        """What ``print(objective)`` adds."""
        return f"{super().extra_repr()}, soft={self.soft}"


class SoftMajorityVote(MajorityVote):
    """:class:`MajorityVote` against the (weighted) proportions of an item's labels."""

    name: ClassVar[str] = "soft-majority-vote"

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        num_labels: int | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(num_classes, num_annotators, num_labels=num_labels, reduction=reduction, soft=True)
