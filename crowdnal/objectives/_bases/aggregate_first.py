"""Base of objectives that aggregate the labels first, then train on the result."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from crowdnal.aggregation.em import Prior
from crowdnal.data import Annotations
from crowdnal.functional import label_counts
from crowdnal.functional.segments import annotation_weight
from crowdnal.objectives._bases.closed_form import BeforehandOptions, ClosedFormObjective
from crowdnal.objectives._bases.targets import most_probable


class AggregateFirst(ClosedFormObjective):
    """Base of those whose targets are the posteriors of an aggregation of the labels, found once before training.

    Needs ``on_train_start(annotations)``. A method implements ``_aggregate``.

    Args:
        soft: train on the posteriors; otherwise on their most probable class (the first of equals).
    """

    takes_unsure: ClassVar[bool] = False
    """Whether there may be labels behind the classes, which are no votes."""

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        soft: bool = True, smoothing: float = 0.1, confusion_prior: Prior = None, **known: Unpack[BeforehandOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, smoothing=smoothing, confusion_prior=confusion_prior, **known)
        if self.initial is None and not self.takes_unsure:
            self.require_square(f"{type(self).__name__} without initial_confusion")
        self.soft = soft

    def _due(self, epoch: int) -> bool:
        return False

    def _find_prior(self, annotations: Annotations) -> None:
        """The aggregation brings it."""

    def _init_targets(self, annotations: Annotations) -> None:
        posterior = self._aggregate(annotations)
        self._set_targets(posterior if self.soft else most_probable(posterior))

    def _aggregate(self, annotations: Annotations) -> Tensor:
        """The posteriors ``[N, C]``, float64; sets the confusions too."""
        raise NotImplementedError

    def _count_against(self, posterior: Tensor, annotations: Annotations) -> Tensor:
        """The posterior, against which the confusions are counted."""
        weight = annotation_weight(annotations, None, torch.float64)
        self._count(label_counts(posterior, annotations, weight=weight))
        return posterior
