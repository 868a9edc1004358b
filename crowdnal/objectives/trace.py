"""Trace-regularised confusions (Anno-Reg).

Tanno et al., Learning From Noisy Labels By Regularized Estimation Of Annotator Confusion, CVPR 2019.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from crowdnal.confusion import LowRankMixture, Normalization, NormalizedConfusion
from crowdnal.data import Annotations
from crowdnal.functional import Reduction
from crowdnal.objectives._bases.confusions import Groups, MixtureObjective, annotators_in

Scope = Literal["all", "batch"]


class TraceRegularized(MixtureObjective):
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
        groups: ``[R]`` the group of each annotator, 0 to G-1; its members share A. Not in the paper.
        rank: ``A_r`` = a diagonal plus a mixture of this many label distributions (1 to min(C, K)), so that a thousand
            classes and thousands of annotators fit; :class:`crowdnal.confusion.LowRankMixture` (``normalization`` is
            then softmax throughout). Not in the paper. ``confusion()`` still builds ``[R, C, K]``; the loss,
            ``reliability()`` and ``posterior()`` do not.
        sparse_grad: sparse gradients for the confusions, as :func:`crowdnal.functional.crowd_mixture_nll` does;
            full rank only, needs ``scope="batch"`` (or ``trace_weight=0``) and `torch.optim.SparseAdam` or SGD.
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
        groups: Groups | None = None,
        rank: int | None = None,
        sparse_grad: bool = False,
    ) -> None:
        super().__init__(
            num_classes, num_annotators, num_labels=num_labels, reduction=reduction, groups=groups, rank=rank
        )
        if not trace_weight >= 0:
            raise ValueError(f"trace_weight={trace_weight!r} must be 0 or more: the trace is minimised")
        if warmup_epochs < 0:
            raise ValueError(f"warmup_epochs={warmup_epochs!r} must be 0 or more")
        if scope not in ("all", "batch"):
            raise ValueError(f"scope={scope!r} is unknown: use 'all' or 'batch'")
        if sparse_grad and scope == "all" and trace_weight > 0:
            raise ValueError("sparse_grad=True needs scope='batch': the trace of all annotators has a dense gradient")
        if sparse_grad and rank is not None:
            raise ValueError(f"sparse_grad=True is for full matrices: leave it out with rank={rank}")
        self.sparse_grad = sparse_grad
        self.trace_weight = trace_weight
        self.warmup_epochs = warmup_epochs
        self.scope: Scope = scope
        self.annotators: NormalizedConfusion | LowRankMixture
        if rank is None:
            self.annotators = NormalizedConfusion(
                self.num_matrices,
                num_classes,
                self.num_labels,
                normalization=normalization,
                on=1.0,
                off=-5.0,
                sparse_grad=sparse_grad,
            )
        else:
            self.annotators = LowRankMixture(self.num_matrices, num_classes, self.num_labels, rank=rank)
        # a flag and not the epoch: torch.compile would compile anew for every epoch
        self._in_warmup: bool | None = None

    def on_epoch_start(self, epoch: int) -> None:
        """Tells the warm-up where it is."""
        self._in_warmup = epoch < self.warmup_epochs

    def penalty(self, annotations: Annotations) -> Tensor | None:
        """``± trace_weight · mean_r trace(A_r)``, minus during warm-up."""
        if self.trace_weight == 0:
            return None
        weight = -self.trace_weight if self._warming_up() else self.trace_weight
        if self.scope == "all":
            return weight * self._of_annotators(self.annotators.traces()).mean()
        chosen, present = annotators_in(annotations)
        return weight * (self.annotators.traces(self._matrix_of(chosen)) * present).sum() / present.sum()

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

    def extra_repr(self) -> str:
        """What ``print(objective)`` adds."""
        warmup = f", warmup_epochs={self.warmup_epochs}" if self.warmup_epochs else ""
        return f"{super().extra_repr()}, trace_weight={self.trace_weight}, scope={self.scope!r}{warmup}"
