"""One confusion for all: Sukhbaatar et al., Training Convolutional Networks with Noisy Labels, ICLR workshop 2015."""

from __future__ import annotations

from typing import Literal, Unpack

from torch import Tensor
from typing_extensions import override

from crowdnal._utils.options import check_amount, check_choice
from crowdnal.aggregation.em import Prior
from crowdnal.confusion import Normalization
from crowdnal.data import Annotations
from crowdnal.objectives._bases.base import ObjectiveOptions
from crowdnal.objectives._bases.confusions import MixtureObjective
from crowdnal.objectives._registry import register

Regularizer = Literal["trace", "frobenius"]


@register("single-confusion", link="p A, one A for all", source="Sukhbaatar et al. 2015")
class SingleConfusion(MixtureObjective):
    """``-log Σ_k p[k] A[k, y]`` of each label with one matrix for all annotators, plus a penalty on A.

    The baseline that knows labels to be noisy but not who gave them; ``confusion()`` gives A for each of them. The
    penalty is ``penalty_weight`` times the trace (of all matrices that explain the labels, the true one has the
    smallest) or times the squared Frobenius norm, which the paper trains with in practice: both spread A.

    Where the paper differs: its A is a free matrix projected onto the stochastic ones after every step, held at the
    identity until the network has learned something; here A is normalised by construction and initialised near the
    identity (6I - 5 before the softplus).

    Args:
        penalty_weight: λ, 0 or more.
        regularizer: ``"trace"`` or ``"frobenius"``.
        normalization: ``"softplus"`` or ``"softmax"`` of the stored matrix.
    """

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        penalty_weight: float = 0.01, regularizer: Regularizer = "trace", normalization: Normalization = "softplus",
        rank: int | None = None, confusion_prior: Prior = "crowd", **common: Unpack[ObjectiveOptions],
    ) -> None:  # fmt: skip
        everyone = [0] * num_annotators if isinstance(num_annotators, int) and num_annotators > 0 else None
        super().__init__(
            num_classes, num_annotators, groups=everyone, rank=rank, confusion_prior=confusion_prior, **common
        )
        check_amount("the trace or norm is minimised", penalty_weight=penalty_weight)
        check_choice(Regularizer, regularizer=regularizer)
        self.penalty_weight = penalty_weight
        self.regularizer: Regularizer = regularizer
        self.annotators = self.stochastic_matrices(normalization)

    @override
    def penalty(self, annotations: Annotations) -> Tensor | None:
        """``penalty_weight`` times trace(A) or ‖A‖²."""
        if self.penalty_weight == 0:
            return None
        if self.regularizer == "trace":
            return self.penalty_weight * self.annotators.traces().sum()
        return self.penalty_weight * self.annotators.square_norms().sum()
