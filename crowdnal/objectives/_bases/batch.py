"""What a method computes from."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from crowdnal.data import Annotations
from crowdnal.functional import Reduction, crowd_mixture_nll


class Batch(NamedTuple):
    """Checked inputs of an objective, with autocast switched off.

    Attributes:
        logits: ``[B, C]``, in the widest of float32, their own dtype and that of the objective's parameters.
        annotations: of the same B items, on the logits' device.
        features: ``[B, D]``; None where the objective does not need them.
        weight: ``[nnz]`` of the annotations; None = 1.
        reduction: of what is asked for, as of :class:`crowdnal.Objective`.
    """

    logits: Tensor
    annotations: Annotations
    features: Tensor | None
    weight: Tensor | None
    reduction: Reduction

    def mixture_nll(self, table: Tensor, normalization: Literal["softmax", "softplus", "none"]) -> Tensor:
        """:func:`crowdnal.functional.crowd_mixture_nll` of the labels through ``table [R, K, C]``."""
        logits, annotations, _, weight, reduction = self
        return crowd_mixture_nll(
            logits.log_softmax(-1), table, annotations, normalization=normalization, weight=weight, reduction=reduction
        )

    def of(self, annotations: Annotations) -> Batch:
        """The same, with other weights of the annotations."""
        return self._replace(annotations=annotations, weight=annotations.weight)

    def each(self) -> Batch:
        """The same, of which each annotation's own term is asked for: unweighted, not reduced."""
        ones = self.logits.new_ones(self.annotations.num_annotations)
        return Batch(self.logits, self.annotations, self.features, ones, "none")
