"""Overparametrised CrowdLayer: Chu et al., Learning from Crowds by Modeling Common Confusions, AAAI 2021, app. C."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from crowdnal.annotations import Annotations
from crowdnal.confusion import FreeConfusion, whole
from crowdnal.functional import Reduction, crowd_cross_entropy
from crowdnal.functional._common import index_of
from crowdnal.functional._reduction import reduction_weights
from crowdnal.functional.mix import mix
from crowdnal.objectives.base import Objective

Hidden = Literal["linear", "softmax"]


class OverparametrizedCrowdLayer(Objective):
    """CrowdLayer with two matrices an annotator: cross-entropy of each label against softmax((p V_r) W_r) (DL-CL_Over).

    A control for CoNAL's number of parameters: twice those of :class:`CrowdLayer`, and no better. V_r ``[C, C]`` and
    W_r ``[C, K]`` start at the identity. The paper speaks of "another softmax layer for each annotator" and its
    authors released no code for it; ``hidden="softmax"`` reads it as softmax(softmax(p V_r) W_r).

    Args:
        hidden: what follows the first matrix: nothing (``"linear"``) or a ``"softmax"``.
    """

    name: ClassVar[str] = "crowd-layer-over"

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        num_labels: int | None = None,
        reduction: Reduction = "mean",
        hidden: Hidden = "linear",
    ) -> None:
        super().__init__(num_classes, num_annotators, num_labels=num_labels, reduction=reduction)
        if hidden not in get_args(Hidden):
            raise ValueError(f"hidden={hidden!r} is unknown: use one of {', '.join(get_args(Hidden))}")
        self.hidden: Hidden = hidden
        self.first = FreeConfusion(num_annotators, num_classes, num_classes)
        self.second = FreeConfusion(num_annotators, num_classes, self.num_labels)

    def confusion(self) -> Tensor:
        """``[R, C, K]``: softmax of the scores for a classifier that is certain of class k."""
        first, second = whole(self.first.weight), whole(self.second.weight)
        return (self._activate(first) @ second).softmax(-1)

    def _activate(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1) if self.hidden == "softmax" else scores

    def _nll(
        self,
        logits: Tensor,
        annotations: Annotations,
        features: Tensor | None,
        weight: Tensor | None,
        reduction: Reduction,
    ) -> Tensor:
        first = self.first.weight.to(logits.dtype)
        scores = self._activate(mix(logits.softmax(-1), first, index_of(annotations)))
        weight, mean = reduction_weights(annotations, weight, reduction, scores.dtype)
        each: Reduction = "none" if reduction == "none" else "mean" if mean else "sum"
        return crowd_cross_entropy(scores, self.second.weight, _alone(annotations), weight=weight, reduction=each)

    def extra_repr(self) -> str:
        """What ``print(objective)`` adds."""
        return f"{super().extra_repr()}, hidden={self.hidden!r}"


def _alone(annotations: Annotations) -> Annotations:
    """The same annotations without weights, each on an item of its own."""
    a, nnz = annotations, annotations.num_annotations
    indptr = torch.arange(nnz + 1, device=a.device)
    item = torch.arange(nnz, device=a.device)
    return a._like(indptr, a.annotator, a.label, None, None, item, a.order, None, None)
