"""Overparametrised CrowdLayer: Chu et al., Learning from Crowds by Modeling Common Confusions, AAAI 2021, app. C."""

from __future__ import annotations

from typing import Unpack

from crowdnal._utils.options import check_choice
from crowdnal.confusion import Hidden, StackedConfusion
from crowdnal.objectives._bases.confusions import ConfusionOptions, SoftmaxObjective
from crowdnal.objectives._registry import register


@register(
    "crowd-layer-over",
    link="softmax(p V_r W_r), a control for the number of parameters",
    source="Chu et al. 2021, app. C",
)
class OverparametrizedCrowdLayer(SoftmaxObjective):
    """CrowdLayer with two matrices per annotator: cross-entropy of each label against softmax((p V_r) W_r).

    A control for CoNAL's number of parameters (DL-CL_Over): twice those of :class:`CrowdLayer`, and no better. V_r
    ``[C, C]`` and W_r ``[C, K]`` are initialised to the identity. The paper speaks of "another softmax layer for each
    annotator" and its authors released no code for it; ``hidden="softmax"`` reads it as softmax(softmax(p V_r) W_r).
    ``groups`` and ``rank`` are of both V and W.

    Args:
        hidden: what follows the first matrix: nothing (``"linear"``) or a ``"softmax"``.
    """

    annotators: StackedConfusion

    def __init__(
        self, num_classes: int, num_annotators: int, *, hidden: Hidden = "linear", **common: Unpack[ConfusionOptions]
    ) -> None:
        super().__init__(num_classes, num_annotators, **common)
        check_choice(Hidden, hidden=hidden)
        sizes = self.num_matrices, num_classes, self.num_labels
        self.annotators = StackedConfusion(*sizes, hidden=hidden, rank=self.rank, common=self.has_prior)
