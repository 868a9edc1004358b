"""GeoCrowdNet: Ibrahim, Nguyen & Fu, Deep Learning from Crowdsourced Labels, ICLR 2023."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from crowdnal.confusion import LowRankMixture, Normalization, NormalizedConfusion
from crowdnal.data import Annotations
from crowdnal.functional import Reduction
from crowdnal.objectives._bases.confusions import Groups, MixtureObjective, annotators_in
from crowdnal.objectives.trace import Scope

Volume = Literal["F", "W"]


class GeoCrowdNet(MixtureObjective):
    """``-log Σ_k p[k] A_r[k, y]`` of each label, minus ``volume_weight`` times the log-volume of all p or of all A.

    Of all pairs of predictions and confusions with the same products the true one has the predictions of the largest
    volume if they reach far enough into the simplex (``volume="F"``: log det of the ``[C, C]`` Gram matrix of the
    predictions for the batch's labelled items), and the confusions of the largest volume if the annotators' do
    (``volume="W"``: log det of ``mean_r A_r A_rᵀ``). Both are *maximised*. Gram matrices are means where the paper has
    sums, which changes the loss by a constant and the gradient not at all.

    A term whose Gram matrix is not positive definite, in the precision of the logits, is left out of that step: so F
    does nothing in a batch with fewer labelled items than classes, or while all predictions are alike.

    A is the softmax of a free matrix (6I - 5 at the start) over the observed labels; implementations with softplus or
    from the identity exist.

    Args:
        volume: ``"F"`` or ``"W"``.
        volume_weight: λ, 0 or more.
        normalization: ``"softmax"`` or ``"softplus"``.
        scope: for W, ``"all"`` annotators (the paper; the cost of a step grows with R) or those who label something in
            the ``"batch"``.
        groups: ``[R]`` the group of each annotator, 0 to G-1; its members share A. Not in the paper.
        rank: low-rank A as in :class:`TraceRegularized`. Not in the paper. Both Gram matrices are ``[C, C]`` still, one
            of each a step.
    """

    name: ClassVar[str] = "geocrowdnet"

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        num_labels: int | None = None,
        reduction: Reduction = "mean",
        volume: Volume = "F",
        volume_weight: float = 0.01,
        normalization: Normalization = "softmax",
        scope: Scope = "all",
        groups: Groups | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(
            num_classes, num_annotators, num_labels=num_labels, reduction=reduction, groups=groups, rank=rank
        )
        if volume not in get_args(Volume):
            raise ValueError(f"volume={volume!r} is unknown: use 'F' (predictions) or 'W' (confusions)")
        if not volume_weight >= 0:
            raise ValueError(f"volume_weight={volume_weight!r} must be 0 or more: the volume is maximised")
        if scope not in get_args(Scope):
            raise ValueError(f"scope={scope!r} is unknown: use 'all' or 'batch'")
        if volume == "W" and self.num_labels * self.num_matrices < num_classes:
            raise ValueError(
                f"volume='W' is always 0 with {self.num_matrices} matrices of num_labels={self.num_labels} and "
                f"num_classes={num_classes}: use volume='F'"
            )
        self.volume: Volume = volume
        self.volume_weight = volume_weight
        self.scope: Scope = scope
        self.annotators: NormalizedConfusion | LowRankMixture
        if rank is None:
            self.annotators = NormalizedConfusion(
                self.num_matrices, num_classes, self.num_labels, normalization=normalization
            )
        else:
            self.annotators = LowRankMixture(self.num_matrices, num_classes, self.num_labels, rank=rank)

    def penalty(self, annotations: Annotations) -> Tensor | None:
        """``- volume_weight · log det mean_r A_r A_rᵀ`` for W; F has none, its term needs the logits."""
        if self.volume == "F" or self.volume_weight == 0:
            return None
        if self.scope == "all":
            gram = self.annotators.gram(self._shares(annotations.device))
        else:
            chosen, present = annotators_in(annotations)
            gram = self.annotators.gram(present / present.sum(), self._matrix_of(chosen))
        return -self.volume_weight * log_det(gram)

    def _shares(self, device: torch.device) -> Tensor:
        """``[G]``, each matrix's share of the annotators."""
        each = torch.full((self.num_annotators,), 1 / self.num_annotators, dtype=torch.float64, device=device)
        return each if self.groups is None else each.new_zeros(self.num_matrices).index_add(0, self.groups, each)

    def _loss(self, logits: Tensor, annotations: Annotations, features: Tensor | None) -> Tensor:
        loss = super()._loss(logits, annotations, features)
        if self.volume == "W" or self.volume_weight == 0 or self.reduction == "none" or not annotations.num_annotations:
            return loss
        labelled = annotations.counts > 0
        p = logits.softmax(-1).where(labelled.unsqueeze(1), 0.0)
        return loss - self.volume_weight * log_det(p.T @ p / labelled.sum())

    def extra_repr(self) -> str:
        """What ``print(objective)`` adds."""
        scope = f", scope={self.scope!r}" if self.volume == "W" else ""
        return f"{super().extra_repr()}, volume={self.volume!r}, volume_weight={self.volume_weight}{scope}"


def log_det(gram: Tensor) -> Tensor:
    """Log-determinant of a symmetric matrix; 0, and no gradient, if it is not positive definite. Never synchronises.

    A pivot that rounding alone can make counts as 0: whether a singular matrix has one depends on the processor.
    """
    with torch.no_grad():
        factor, failed = torch.linalg.cholesky_ex(gram)
        rounding = len(gram) * torch.finfo(gram.dtype).eps * gram.diagonal().amax()
        usable = (failed == 0) & (factor.diagonal().square().amin() > rounding)
    # a matrix that fails is exchanged before, not after: the gradient of its factor would be NaN, and 0 · NaN is NaN
    safe = torch.where(usable, gram, torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    return 2 * torch.linalg.cholesky_ex(safe)[0].diagonal().log().sum()
