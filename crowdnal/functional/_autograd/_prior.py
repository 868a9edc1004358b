"""The prior of matrices' rows where no step op makes it with the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crowdnal.functional.prior import DirichletPrior, PriorParts, prior_parts
from crowdnal.functional.segments import gather_rows, scatter_rows


@dataclass(frozen=True)
class PlainPrior:
    """What the prior of a step's op adds to a loss, and its derivative: both differentiable to any order.

    Attributes:
        log_rows: logarithms of the rows of matrices [r, ...], with the arguments of the op.
        pull_back: the gradient for the matrices from one for their `log_rows`.
        dim: of the prior, as the op takes it, along which its distributions lie.
    """

    log_rows: Callable[[Tensor, Any], Tensor]
    pull_back: Callable[[Tensor, Tensor, Any], Tensor]
    dim: int

    def loss(self, a: Any) -> Tensor:
        """[], of the arguments of the op."""
        return self._parts(a).loss()

    def gradients(self, a: Any, grad_loss: Tensor, *, need_weight: bool) -> tuple[Tensor, Tensor | None]:
        """(for the confusion, for the weight if it is needed)."""
        parts = self._parts(a)
        grad = -(grad_loss * parts.share).view(-1, 1, 1) * a.prior
        rows = self.pull_back(a.confusion[parts.chosen], grad, a)
        order, (num_annotators, *sizes) = torch.argsort(parts.chosen, stable=True), a.confusion.shape
        rows = rows.reshape(len(parts.chosen), sizes[0] * sizes[1])
        confusion = scatter_rows(rows, parts.chosen, order, num_annotators).reshape(num_annotators, *sizes)
        if not need_weight:
            return confusion, None
        each = (grad_loss * parts.unit * parts.distance).unsqueeze(1)
        return confusion, gather_rows(each, parts.slot, a.order).squeeze(1)

    def _parts(self, a: Any) -> PriorParts:
        prior = DirichletPrior(a.prior, a.labels_given)
        rows = lambda chosen: self.log_rows(a.confusion[chosen], a)  # noqa: E731
        return prior_parts(prior, rows, a.annotator, a.order, a.weight, mean=a.mean, dim=self.dim)
