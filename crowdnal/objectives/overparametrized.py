"""Overparametrised CrowdLayer: Chu et al., Learning from Crowds by Modeling Common Confusions, AAAI 2021, app. C."""

from __future__ import annotations

from typing import ClassVar, get_args

from torch import Tensor

from crowdnal.confusion import Hidden, StackedConfusion
from crowdnal.data import Annotations
from crowdnal.functional import Reduction
from crowdnal.objectives._bases.confusions import ConfusionObjective, Groups


class OverparametrizedCrowdLayer(ConfusionObjective):
    """CrowdLayer with two matrices an annotator: cross-entropy of each label against softmax((p V_r) W_r) (DL-CL_Over).

    A control for CoNAL's number of parameters: twice those of :class:`CrowdLayer`, and no better. V_r ``[C, C]`` and
    W_r ``[C, K]`` start at the identity. The paper speaks of "another softmax layer for each annotator" and its
    authors released no code for it; ``hidden="softmax"`` reads it as softmax(softmax(p V_r) W_r).

    Args:
        hidden: what follows the first matrix: nothing (``"linear"``) or a ``"softmax"``.
        groups: ``[R]`` the group of each annotator, 0 to G-1; its members share V and W. Not in the paper.
        rank: V_r and W_r are each a diagonal plus a matrix of this rank (1 to min(C, K)), so that a thousand classes
            and thousands of annotators fit, as in :class:`CrowdLayer`. Not in the paper.
    """

    name: ClassVar[str] = "crowd-layer-over"

    annotators: StackedConfusion

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        num_labels: int | None = None,
        reduction: Reduction = "mean",
        hidden: Hidden = "linear",
        groups: Groups | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(
            num_classes, num_annotators, num_labels=num_labels, reduction=reduction, groups=groups, rank=rank
        )
        if hidden not in get_args(Hidden):
            raise ValueError(f"hidden={hidden!r} is unknown: use one of {', '.join(get_args(Hidden))}")
        self.annotators = StackedConfusion(self.num_matrices, num_classes, self.num_labels, hidden=hidden, rank=rank)

    def confusion(self) -> Tensor:
        """``[R, C, K]``: softmax of the scores for a classifier that is certain of class k."""
        return super().confusion()

    def _nll(
        self,
        logits: Tensor,
        annotations: Annotations,
        features: Tensor | None,
        weight: Tensor | None,
        reduction: Reduction,
    ) -> Tensor:
        return self.annotators.nll(logits.softmax(-1), self._by_matrix(annotations), weight, reduction)

    def extra_repr(self) -> str:
        """What ``print(objective)`` adds."""
        return f"{super().extra_repr()}, hidden={self.annotators.hidden!r}"
