"""What objectives share whose annotators (or groups of them) each have a confusion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor
from typing_extensions import override

from crowdnal import metrics
from crowdnal.aggregation import posterior_of_log_likelihood
from crowdnal.confusion import (
    BlockwiseConfusion,
    FreeConfusion,
    LowRankConfusion,
    LowRankMixture,
    Normalization,
    NormalizedConfusion,
    StackedConfusion,
    VectorConfusion,
)
from crowdnal.data import Annotations
from crowdnal.functional.segments import distinct
from crowdnal.objectives._bases.base import Objective, ObjectiveOptions
from crowdnal.objectives._bases.batch import Batch

Groups = Tensor | Sequence[int]
Scope = Literal["all", "batch"]
"""Which annotators a penalty is of: all of them, or those who label something in the batch."""


class ConfusionOptions(ObjectiveOptions, total=False):
    """Those of :class:`ConfusionObjective`."""

    groups: Groups | None
    rank: int | None


class ConfusionObjective(Objective):
    """Base of objectives with ``self.annotators``, a module of :mod:`crowdnal.confusion` with one matrix a group.

    Args:
        groups: ``[R]`` the group of each annotator, 0 to G-1: members of a group share a matrix; None: everyone has
            their own. Not in the papers.
        rank: each matrix is a diagonal plus one of this rank (:class:`crowdnal.confusion.LowRankConfusion`,
            :class:`crowdnal.confusion.LowRankMixture`), 1 to min(C, K), so that a thousand classes and thousands of
            annotators fit; None: full matrices. Not in the papers. ``confusion()`` still builds ``[R, C, K]``; the
            loss, ``reliability()`` and ``posterior()`` do not.
    """

    annotators: FreeConfusion | LowRankMixture | NormalizedConfusion | BlockwiseConfusion | VectorConfusion
    groups: Tensor | None

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        groups: Groups | None = None, rank: int | None = None, **common: Unpack[ObjectiveOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, **common)
        most = min(self.num_classes, self.num_labels)
        if rank is not None and not (isinstance(rank, int) and 1 <= rank <= most):
            raise ValueError(
                f"rank={rank!r} must be 1 to min(num_classes, num_labels)={most}, or None for full matrices"
            )
        self.rank = rank
        self.num_matrices = num_annotators
        self.register_buffer("groups", None)
        if groups is not None:
            self.groups = _checked(groups, num_annotators)
            self.num_matrices = int(self.groups.max()) + 1

    @override
    def confusion(self) -> Tensor:
        """``[R, C, K]``, detached. Built whole, also where the matrices are low-rank or shared.

        Of scores: softmax of those of a classifier that is certain of class k.
        """
        return self._of_annotators(self.annotators.probs())

    @override
    def reliability(self) -> Tensor:
        """``[R]``: :func:`crowdnal.metrics.reliability`; low-rank matrices are not built for it."""
        if isinstance(self.annotators, (LowRankMixture, BlockwiseConfusion)):
            return self._of_annotators(metrics.balanced_accuracy(self.annotators.diagonals(), self.num_classes))
        return super().reliability()

    @override
    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.groups is None else f", groups={self.num_matrices}")

    def _of_annotators(self, matrices: Tensor) -> Tensor:
        """What each annotator has of ``[G, ...]``."""
        return matrices if self.groups is None else matrices[self.groups]

    def _matrix_of(self, annotators: Tensor) -> Tensor:
        """The matrices of these annotators."""
        return annotators if self.groups is None else self.groups[annotators]

    def _by_matrix(self, annotations: Annotations) -> Annotations:
        """The annotations, as given by the owners of the matrices."""
        return annotations if self.groups is None else annotations.regroup(self.groups, self.num_matrices)

    def _require_full(self, sparse_grad: bool) -> None:
        if sparse_grad and self.rank is not None:
            raise ValueError(f"sparse_grad=True is for full matrices: leave it out with rank={self.rank}")

    def _posterior(self, batch: Batch) -> Tensor:
        if not isinstance(self.annotators, (LowRankMixture, BlockwiseConfusion)):
            return super()._posterior(batch)
        rows = self.annotators.log_likelihoods(self._by_matrix(batch.annotations)).to(batch.logits.dtype)
        return posterior_of_log_likelihood(batch.logits.log_softmax(-1), rows, batch.annotations)


class SoftmaxObjective(ConfusionObjective):
    """Base of those whose scores of labels are the class probabilities p mapped by matrices: the softmax link."""

    annotators: FreeConfusion | LowRankConfusion | StackedConfusion | VectorConfusion

    def free_matrices(self, scale: float = 1.0, *, sparse_grad: bool = False) -> FreeConfusion | LowRankConfusion:
        """A matrix per annotator (or group), initialised to ``scale`` times the identity, of the asked rank."""
        self._require_full(sparse_grad)
        sizes = self.num_matrices, self.num_classes, self.num_labels
        if self.rank is None:
            return FreeConfusion(*sizes, scale=scale, sparse_grad=sparse_grad)
        return LowRankConfusion(*sizes, scale=scale, rank=self.rank)

    def _nll(self, batch: Batch) -> Tensor:
        owners = self._by_matrix(batch.annotations)
        return self.annotators.nll(batch.logits.softmax(-1), owners, batch.weight, batch.reduction)

    def _label_log_probs(self, batch: Batch) -> Tensor:
        return self.annotators.scores(batch.logits.softmax(-1), self._by_matrix(batch.annotations)).log_softmax(-1)


class MixtureObjective(ConfusionObjective):
    """Base of those whose label probabilities are ``p A_r``: the mixture link."""

    annotators: LowRankMixture | NormalizedConfusion

    def stochastic_matrices(
        self, normalization: Normalization, *, sparse_grad: bool = False
    ) -> LowRankMixture | NormalizedConfusion:
        """A row-stochastic matrix per annotator (or group) of the asked rank; a low-rank one is softmax throughout."""
        self._require_full(sparse_grad)
        sizes = self.num_matrices, self.num_classes, self.num_labels
        if self.rank is None:
            return NormalizedConfusion(*sizes, normalization=normalization, sparse_grad=sparse_grad)
        return LowRankMixture(*sizes, rank=self.rank)

    def _nll(self, batch: Batch) -> Tensor:
        owners = self._by_matrix(batch.annotations)
        return self.annotators.nll(batch.logits.log_softmax(-1), owners, batch.weight, batch.reduction)


def annotators_in(annotations: Annotations) -> tuple[Tensor, Tensor]:
    """Each annotator of the batch once, in min(nnz, R) slots, and a float mask of the slots in use."""
    chosen, slot = distinct(annotations.annotator, annotations.order, annotations.num_annotators)
    return chosen, torch.zeros_like(chosen, dtype=torch.float32).scatter(0, slot, 1.0)


def _checked(groups: Groups, num_annotators: int) -> Tensor:
    try:
        found = torch.as_tensor(groups)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"groups={groups!r} must be integers, one per annotator") from None
    if found.shape != (num_annotators,) or found.is_floating_point() or found.dtype == torch.bool:
        raise ValueError(
            f"groups is {found.dtype} {list(found.shape)} but must be integers [num_annotators={num_annotators}]: the "
            "group of every annotator"
        )
    if bool((found < 0).any()):
        r = int((found < 0).nonzero()[0])
        raise ValueError(f"groups[{r}]={int(found[r])} must be 0 or more: number the groups from 0")
    return found.long().clone()
