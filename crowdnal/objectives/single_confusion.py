"""One confusion for all: Sukhbaatar et al., Training Convolutional Networks with Noisy Labels, ICLR workshop 2015."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from torch import Tensor

from crowdnal.confusion import LowRankMixture, Normalization, NormalizedConfusion
from crowdnal.data import Annotations
from crowdnal.functional import Reduction
from crowdnal.objectives._bases.confusions import MixtureObjective

Regularizer = Literal["trace", "frobenius"]


class SingleConfusion(MixtureObjective):
    """``-log Σ_k p[k] A[k, y]`` of each label with one matrix for all annotators, plus a penalty on A.

    The baseline that knows labels to be noisy but not who gave them. The penalty is ``penalty_weight`` times the trace
    (of all matrices that explain the labels, the true one has the smallest) or times the squared Frobenius norm, which
    the paper trains with in practice: both spread A.

    Where the paper differs: its A is a free matrix projected onto the stochastic ones after every step, held at the
    identity until the network has learned something; here A is normalised by construction and trained from a start near
    the identity (6I - 5 before the softplus).

    Args:
        penalty_weight: λ, 0 or more.
        regularizer: ``"trace"`` or ``"frobenius"``.
        normalization: ``"softplus"`` or ``"softmax"`` of the stored matrix.
        rank: A = a diagonal plus a mixture of this many label distributions (1 to min(C, K));
            :class:`crowdnal.confusion.LowRankMixture` (softmax throughout). Not in the paper.
    """

    name: ClassVar[str] = "single-confusion"

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        num_labels: int | None = None,
        reduction: Reduction = "mean",
        penalty_weight: float = 0.01,
        regularizer: Regularizer = "trace",
        normalization: Normalization = "softplus",
        rank: int | None = None,
    ) -> None:
        everyone = [0] * num_annotators if isinstance(num_annotators, int) and num_annotators > 0 else None
        super().__init__(
            num_classes, num_annotators, num_labels=num_labels, reduction=reduction, groups=everyone, rank=rank
        )
        if not penalty_weight >= 0:
            raise ValueError(f"penalty_weight={penalty_weight!r} must be 0 or more: the trace or norm is minimised")
        if regularizer not in get_args(Regularizer):
            raise ValueError(f"regularizer={regularizer!r} is unknown: use one of {', '.join(get_args(Regularizer))}")
        self.penalty_weight = penalty_weight
        self.regularizer: Regularizer = regularizer
        self.annotators: NormalizedConfusion | LowRankMixture
        if rank is None:
            self.annotators = NormalizedConfusion(1, num_classes, self.num_labels, normalization=normalization)
        else:
            self.annotators = LowRankMixture(1, num_classes, self.num_labels, rank=rank)

    def confusion(self) -> Tensor:
        """``[R, C, K]``: R times A."""
        return super().confusion()

    def penalty(self, annotations: Annotations) -> Tensor | None:
        """``penalty_weight`` times trace(A) or ‖A‖²."""
        if self.penalty_weight == 0:
            return None
        if self.regularizer == "trace":
            return self.penalty_weight * self.annotators.traces().sum()
        return self.penalty_weight * self.annotators.square_norms().sum()

    def extra_repr(self) -> str:
        """What ``print(objective)`` adds."""
        return f"{super().extra_repr()}, penalty_weight={self.penalty_weight}, regularizer={self.regularizer!r}"
