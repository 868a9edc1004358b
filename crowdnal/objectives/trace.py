"""Trace-regularised confusions (Anno-Reg).

Tanno et al., Learning From Noisy Labels By Regularized Estimation Of Annotator Confusion, CVPR 2019.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from crowdnal.annotations import Annotations
from crowdnal.confusion import Normalization, NormalizedConfusion
from crowdnal.functional import Reduction, crowd_mixture_nll
from crowdnal.objectives.base import Objective

Scope = Literal["all", "batch"]


class TraceRegularized(Objective):
    """``-log Σ_k p[k] A_r[k, y]`` of each label, plus ``trace_weight`` times the mean trace of all ``A_r``.

    The trace is *minimised*: of all confusions that explain the labels, those of the smallest trace are the
    true ones if the mean confusion is diagonally dominant (theorem 1). ``A_r`` is the softplus of a free
    matrix (6I - 5 at the start), normalised over the observed labels.

    Where the authors' code differs: it sums the loss over an item's annotators and averages over items
    (``reduction="sum"`` divided by B), and clips the mixture to [1e-10, 1), so that a confidently
    contradicted label has no gradient; here the mean is over annotations and all is in the log domain without
    a clip. The published numbers used theirs, with ``trace_weight=0.01`` and no warm-up.

    Args:
        trace_weight: λ.
        normalization: ``"softplus"`` (the paper) or ``"softmax"`` (found in other implementations).
        warmup_epochs: epochs in which the trace is *maximised*, so that confusions start diagonal; from the
            follow-up on segmentation (Zhang et al., NeurIPS 2020), not from this paper. Needs
            ``on_epoch_start(epoch)``.
        scope: mean trace over ``"all"`` annotators (the paper; the cost of a step grows with R) or over those
            who label something in the ``"batch"``.
        sparse_grad: sparse gradients for the confusions, as :func:`crowdnal.functional.crowd_mixture_nll` does;
            needs ``scope="batch"`` (or ``trace_weight=0``) and `torch.optim.SparseAdam` or SGD.
    """

    name: ClassVar[str] = "trace"

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        num_labels: int | None = None,
        reduction: Reduction = "mean",
        trace_weight: float = 0.01,
        normalization: Normalization = "softplus",
        warmup_epochs: int = 0,
        scope: Scope = "all",
        sparse_grad: bool = False,
    ) -> None:
        super().__init__(num_classes, num_annotators, num_labels=num_labels, reduction=reduction)
        if not trace_weight >= 0:
            raise ValueError(f"trace_weight={trace_weight!r} must be 0 or more: the trace is minimised")
        if warmup_epochs < 0:
            raise ValueError(f"warmup_epochs={warmup_epochs!r} must be 0 or more")
        if scope not in ("all", "batch"):
            raise ValueError(f"scope={scope!r} is unknown: use 'all' or 'batch'")
        if sparse_grad and scope == "all" and trace_weight > 0:
            raise ValueError("sparse_grad=True needs scope='batch': the trace of all annotators has a dense gradient")
        self.sparse_grad = sparse_grad
        self.trace_weight = trace_weight
        self.warmup_epochs = warmup_epochs
        self.scope: Scope = scope
        self.annotators = NormalizedConfusion(
            num_annotators,
            num_classes,
            self.num_labels,
            normalization=normalization,
            on=1.0,
            off=-5.0,
            sparse_grad=sparse_grad,
        )
        # a flag and not the epoch: torch.compile would compile anew for every epoch
        self._in_warmup: bool | None = None

    def on_epoch_start(self, epoch: int) -> None:
        """Tells the warm-up where it is."""
        self._in_warmup = epoch < self.warmup_epochs

    def confusion(self) -> Tensor:
        """``[R, C, K]``: A."""
        return self.annotators.probs()

    def penalty(self, annotations: Annotations) -> Tensor | None:
        """``± trace_weight · mean_r trace(A_r)``, minus during warm-up."""
        if self.trace_weight == 0:
            return None
        weight = -self.trace_weight if self._warming_up() else self.trace_weight
        if self.scope == "all":
            return weight * self.annotators.traces().mean()
        chosen, present = _annotators_in(annotations)
        return weight * (self.annotators.traces(chosen) * present).sum() / present.sum()

    def _warming_up(self) -> bool:
        if self.warmup_epochs == 0:
            return False
        if self._in_warmup is None:
            if not self.training:
                return False
            raise RuntimeError(
                f"warmup_epochs={self.warmup_epochs} needs to know the epoch: call "
                "objective.on_epoch_start(epoch) before every epoch, or use warmup_epochs=0"
            )
        return self._in_warmup

    def _nll(
        self,
        logits: Tensor,
        annotations: Annotations,
        features: Tensor | None,
        weight: Tensor | None,
        reduction: Reduction,
    ) -> Tensor:
        return crowd_mixture_nll(
            logits.log_softmax(-1),
            self.annotators.weight,
            annotations,
            normalization=self.annotators.normalization,
            weight=weight,
            reduction=reduction,
            sparse_grad=self.sparse_grad,
        )

    def extra_repr(self) -> str:
        """What ``print(objective)`` adds."""
        warmup = f", warmup_epochs={self.warmup_epochs}" if self.warmup_epochs else ""
        return f"{super().extra_repr()}, trace_weight={self.trace_weight}, scope={self.scope!r}{warmup}"


def _annotators_in(annotations: Annotations) -> tuple[Tensor, Tensor]:
    """Each annotator of the batch once, in min(nnz, R) slots, and a float mask of the slots in use.

    The number of slots depends on shapes alone: no synchronisation with a device, no data-dependent shape.
    """
    ordered = annotations.annotator[annotations.order]
    slot = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).cumsum(0)])
    chosen = ordered.new_zeros(min(len(ordered), annotations.num_annotators))
    present = torch.zeros_like(chosen, dtype=torch.float32)
    # annotations of one annotator write the same value to the same slot
    return chosen.scatter(0, slot, ordered), present.scatter(0, slot, 1.0)
