"""GeoCrowdNet: Ibrahim, Nguyen & Fu, Deep Learning from Crowdsourced Labels, ICLR 2023."""

from __future__ import annotations

from typing import Literal, Unpack

import torch
from torch import Tensor
from typing_extensions import override

from crowdnal._utils.options import check_amount, check_choice
from crowdnal.confusion import Normalization
from crowdnal.data import Annotations
from crowdnal.objectives._bases.batch import Batch
from crowdnal.objectives._bases.confusions import ConfusionOptions, MixtureObjective, Scope, annotators_in
from crowdnal.objectives._registry import register

Volume = Literal["F", "W"]


@register("geocrowdnet", link="p A_r, log det of predictions or confusions maximised", source="Ibrahim et al. 2023")
class GeoCrowdNet(MixtureObjective):
    """``-log Σ_k p[k] A_r[k, y]`` of each label, minus ``volume_weight`` times the log-volume of all p or of all A.

    Of all pairs of predictions and confusions with the same products the true one has the predictions of the largest
    volume if they reach far enough into the simplex (``volume="F"``: log det of the ``[C, C]`` Gram matrix of the
    predictions for the batch's labelled items), and the confusions of the largest volume if the annotators' do
    (``volume="W"``: log det of ``mean_r A_r A_rᵀ``). Both are *maximised*. Gram matrices are means where the paper has
    sums, which changes the loss by a constant and the gradient not at all.

    A term whose Gram matrix is not positive definite, in the precision of the logits, is left out of that step: so F
    does nothing in a batch with fewer labelled items than classes, or while all predictions are alike.

    A is the softmax of a free matrix (initialised to 6I - 5) over the observed labels; implementations with softplus or
    the identity as init exist.

    Args:
        volume: ``"F"`` or ``"W"``.
        volume_weight: λ, 0 or more; with 0.01 a linear classifier that is not trained to its end follows the volume
            instead of the labels.
        normalization: ``"softmax"`` or ``"softplus"``; with a ``rank`` the former.
        scope: for W, ``"all"`` annotators (the paper; the cost of a step grows with R) or those who label something in
            the ``"batch"``.
    """

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        volume: Volume = "F", volume_weight: float = 0.001, normalization: Normalization = "softmax",
        scope: Scope = "all", **common: Unpack[ConfusionOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, **common)
        check_choice(Volume, volume=volume)
        check_choice(Scope, scope=scope)
        check_amount("the volume is maximised", volume_weight=volume_weight)
        if volume == "W" and self.num_labels * self.num_matrices < num_classes:
            raise ValueError(
                f"volume='W' is always 0 with {self.num_matrices} matrices of num_labels={self.num_labels} and "
                f"num_classes={num_classes}: use volume='F'"
            )
        self.volume: Volume = volume
        self.volume_weight = volume_weight
        self.scope: Scope = scope
        self.annotators = self.stochastic_matrices(normalization)

    @override
    def penalty(self, annotations: Annotations) -> Tensor | None:
        """``- volume_weight · log det mean_r A_r A_rᵀ`` for W; F has none, its term needs the logits."""
        if self.volume == "F" or self.volume_weight == 0:
            return None
        if self.scope == "all":
            gram = self.annotators.gram(self._weights(annotations.device))
        else:
            chosen, present = annotators_in(annotations)
            gram = self.annotators.gram(present / present.sum(), self._matrix_of(chosen))
        return -self.volume_weight * log_det(gram)

    def _weights(self, device: torch.device) -> Tensor:
        """``[G]``, the fraction of the annotators that has each matrix."""
        each = torch.full((self.num_annotators,), 1 / self.num_annotators, dtype=torch.float64, device=device)
        return each if self.groups is None else each.new_zeros(self.num_matrices).index_add(0, self.groups, each)

    def _loss(self, batch: Batch) -> Tensor:
        loss, annotations = super()._loss(batch), batch.annotations
        if self.volume == "W" or self.volume_weight == 0 or self.reduction == "none" or not annotations.num_annotations:
            return loss
        labelled = annotations.counts > 0
        p = batch.logits.softmax(-1).where(labelled.unsqueeze(1), 0.0)
        return loss - self.volume_weight * log_det(p.T @ p / labelled.sum())


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
