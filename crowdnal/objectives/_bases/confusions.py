"""What objectives share whose annotators (or groups of them) each have a confusion."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from crowdnal import metrics
from crowdnal.aggregation import posterior_of_log_likelihood
from crowdnal.confusion import BlockwiseConfusion, FreeConfusion, LowRankMixture, NormalizedConfusion, VectorConfusion
from crowdnal.data import Annotations
from crowdnal.functional import Reduction
from crowdnal.objectives._bases.base import Objective

Groups = Tensor | Sequence[int]


class ConfusionObjective(Objective):
    """Base of objectives with ``self.annotators``, a module of :mod:`crowdnal.confusion` with one matrix a group.

    Args:
        groups: ``[R]`` the group of each annotator, 0 to G-1: members of a group share a matrix. Default: everyone
            has their own.
        rank: of the low-rank matrices, 1 to min(C, K); None = full ones.
    """

    annotators: FreeConfusion | LowRankMixture | NormalizedConfusion | BlockwiseConfusion | VectorConfusion
    groups: Tensor | None

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        num_labels: int | None = None,
        reduction: Reduction = "mean",
        groups: Groups | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(num_classes, num_annotators, num_labels=num_labels, reduction=reduction)
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

    def confusion(self) -> Tensor:
        """``[R, C, K]``, detached. Built whole, also where the matrices are low-rank or shared."""
        return self._of_annotators(self.annotators.probs())

    def reliability(self) -> Tensor:
        """``[R]``: :func:`crowdnal.metrics.reliability`; low-rank matrices are not built for it."""
        if isinstance(self.annotators, (LowRankMixture, BlockwiseConfusion)):
            return self._of_annotators(metrics.balanced_accuracy(self.annotators.diagonals(), self.num_classes))
        return super().reliability()

    def extra_repr(self) -> str:
        """What ``print(objective)`` adds."""
        rank = "" if self.rank is None else f", rank={self.rank}"
        return super().extra_repr() + rank + ("" if self.groups is None else f", groups={self.num_matrices}")

    def _of_annotators(self, matrices: Tensor) -> Tensor:
        """What each annotator has of ``[G, ...]``."""
        return matrices if self.groups is None else matrices[self.groups]

    def _matrix_of(self, annotators: Tensor) -> Tensor:
        """The matrices of these annotators."""
        return annotators if self.groups is None else self.groups[annotators]

    def _by_matrix(self, annotations: Annotations) -> Annotations:
        """The annotations, as given by the owners of the matrices."""
        return annotations if self.groups is None else annotations.regroup(self.groups, self.num_matrices)

    def _posterior(self, logits: Tensor, annotations: Annotations, features: Tensor | None) -> Tensor:
        if not isinstance(self.annotators, (LowRankMixture, BlockwiseConfusion)):
            return super()._posterior(logits, annotations, features)
        rows = self.annotators.log_likelihoods(self._by_matrix(annotations)).to(logits.dtype)
        return posterior_of_log_likelihood(logits.log_softmax(-1), rows, annotations)


class MixtureObjective(ConfusionObjective):
    """Base of those whose label probabilities are ``p A_r``: the mixture link."""

    annotators: LowRankMixture | NormalizedConfusion

    def _nll(
        self,
        logits: Tensor,
        annotations: Annotations,
        features: Tensor | None,
        weight: Tensor | None,
        reduction: Reduction,
    ) -> Tensor:
        return self.annotators.nll(logits.log_softmax(-1), self._by_matrix(annotations), weight, reduction)


def annotators_in(annotations: Annotations) -> tuple[Tensor, Tensor]:
    """Each annotator of the batch once, in min(nnz, R) slots, and a float mask of the slots in use.

    The number of slots depends on shapes alone: no synchronisation with a device, no data-dependent shape.
    """
    ordered = annotations.annotator[annotations.order]
    slot = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).cumsum(0)])
    chosen = ordered.new_zeros(min(len(ordered), annotations.num_annotators))
    present = torch.zeros_like(chosen, dtype=torch.float32)
    # annotations of one annotator write the same value to the same slot
    return chosen.scatter(0, slot, ordered), present.scatter(0, slot, 1.0)


def _checked(groups: Groups, num_annotators: int) -> Tensor:
    found = torch.as_tensor(groups)
    if found.shape != (num_annotators,) or found.is_floating_point() or found.dtype == torch.bool:
        raise ValueError(
            f"groups is {found.dtype} {list(found.shape)} but must be integers [num_annotators={num_annotators}]: the "
            "group of every annotator"
        )
    if bool((found < 0).any()):
        r = int((found < 0).nonzero()[0])
        raise ValueError(f"groups[{r}]={int(found[r])} must be 0 or more: number the groups from 0")
    return found.long().clone()
