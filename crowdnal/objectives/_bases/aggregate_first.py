"""Base of objectives that aggregate the labels first, then train on the result."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor
from typing_extensions import override

from crowdnal.aggregation.em import Prior
from crowdnal.data import Annotations, of_classes
from crowdnal.functional import label_counts
from crowdnal.functional.segments import annotation_weight
from crowdnal.objectives._bases.closed_form import BeforehandOptions, ClosedFormObjective
from crowdnal.objectives._bases.targets import most_probable


class AggregateFirst(ClosedFormObjective):
    """Base of those whose targets are the posteriors of an aggregation of the labels, found once before training.

    Needs ``on_train_start(annotations)``. A method implements ``_aggregate``. Labels behind the classes ("unsure") are
    left out of the aggregation; the confusions shown count them.

    Args:
        soft: train on the posteriors; otherwise on their most probable class (the first of equals).
    """

    counted: ClassVar[bool] = True
    """Whether the confusions are counted against the posteriors."""

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        soft: bool = True, smoothing: float = 0.1, confusion_prior: Prior = None, **known: Unpack[BeforehandOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, smoothing=smoothing, confusion_prior=confusion_prior, **known)
        self.soft = soft

    def _due(self, epoch: int) -> bool:
        return False

    def _find_prior(self, annotations: Annotations) -> None:
        """The aggregation brings it."""

    def _init_targets(self, annotations: Annotations) -> None:
        votes = annotations if self.initial is not None else of_classes(annotations, self.num_classes)
        posterior = self._aggregate(votes)
        if votes.num_classes < self.num_labels or self.counted:
            weight = annotation_weight(annotations, None, torch.float64)
            self._count(label_counts(posterior, annotations, weight=weight))
        self._set_targets(posterior if self.soft else most_probable(posterior))

    def _aggregate(self, annotations: Annotations) -> Tensor:
        """The posteriors ``[N, C]``, float64; where ``counted`` is false sets the confusions too."""
        raise NotImplementedError

    def _prior_of(self, annotations: Annotations) -> Prior:
        """The confusions' prior on the labels of ``annotations``, which may be fewer than K."""
        if self.crowd_prior is not None or self.confusion_prior is None:
            return self.crowd_prior
        return self.confusion_prior[..., : annotations.num_classes]

    @override
    def _hold(self, pseudo_counts: Tensor | None) -> None:
        if pseudo_counts is None or pseudo_counts.shape[-1] == self.num_labels:
            super()._hold(pseudo_counts)
