"""A Dirichlet prior of the rows of annotators' matrices, as part of a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from crowdnal import reference
from crowdnal.functional.segments import distinct, scatter_rows

__all__ = ["DirichletPrior", "PriorParts", "is_one", "prior_parts"]


class DirichletPrior(NamedTuple):
    """A Dirichlet prior of the rows of every annotator's matrix, around what is common to all. No part has gradients.

    A loss with it adds, for each annotation of r, what that counts in the loss times the distance of r's rows,
    ``Σ_ck counts[c, k] (log mean[c, k] - log row_r[c, k])``, divided by ``labels_given_r`` (or 1): over an epoch an
    annotator adds it once. ``mean`` are the counts as distributions.

    Attributes:
        counts: ``[C, K]`` pseudo-counts, 0 or more.
        labels_given: ``[R]`` how many labels each annotator gave in all.
        common: ``[C, K]``, of the softmax link: logarithms of what all annotators have in common, added to a matrix
            before the softmax of its rows; None = 0.
    """

    counts: Tensor
    labels_given: Tensor
    common: Tensor | None = None


class PriorParts(NamedTuple):
    """Of the annotators in a batch, in s = min(nnz, R) slots, those that are not in use with share 0.

    Attributes:
        chosen: ``[s]`` who.
        slot: ``[nnz]`` of each annotation.
        unit: ``[s]`` what an annotation of weight 1 counts of its annotator's distance.
        share: ``[s]`` the sum of that over the annotations, with their weights.
        distance: ``[s]``.
    """

    chosen: Tensor
    slot: Tensor
    unit: Tensor
    share: Tensor
    distance: Tensor

    def loss(self) -> Tensor:
        """[]: what is added."""
        return (self.share * self.distance).sum()


def is_one(flag: Tensor) -> bool:
    """Whether it is known to be 1: nothing waits for a device, and what is traced or batched may be anything."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if type(flag) is not Tensor or flag.device.type != "cpu" or flag.dtype not in (torch.float32, torch.float64):
        return False
    return not flag.requires_grad and bool(flag.numpy() == 1)


def prior_parts(
    prior: DirichletPrior,
    log_rows: Callable[[Tensor], Tensor],
    annotator: Tensor,
    order: Tensor,
    weight: Tensor | None,
    *,
    mean: bool,
    dim: int = 1,
) -> PriorParts:
    """What a prior adds to a loss in plain PyTorch, differentiable to any order; nothing waits for a device.

    Args:
        prior: in the dtype of the loss. Of its sizes, ``counts`` may be transposed if the rows are.
        log_rows: logarithms of the rows ``[s, C, K]`` of the annotators ``[s]``.
        annotator: ``[nnz]``, below R.
        order: ``[nnz]``, the stable sort of `annotator`.
        weight: ``[nnz]`` what an annotation counts in the loss; None = 1.
        mean: the loss is divided by nnz.
        dim: of ``counts``, along which distributions lie: 1, or 0 where all is transposed.
    """
    nnz = annotator.shape[0]
    chosen, slot = distinct(annotator, order, prior.labels_given.shape[0])
    unit = 1 / (prior.labels_given[chosen].clamp(min=1) * (max(nnz, 1) if mean else 1))
    each = prior.labels_given.new_ones(nnz) if weight is None else weight
    share = unit * scatter_rows(each.unsqueeze(1), slot, order, len(chosen)).squeeze(1)
    distance = reference.prior_distance(log_rows(chosen).to(unit.dtype), prior.counts, dim)
    return PriorParts(chosen, slot, unit, share, distance)
