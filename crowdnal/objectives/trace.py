"""Trace-regularised confusions (Anno-Reg).

Tanno et al., Learning From Noisy Labels By Regularized Estimation Of Annotator Confusion, CVPR 2019.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor
from typing_extensions import override

from crowdnal._utils.options import check_amount, check_choice, check_integer
from crowdnal.confusion import Normalization
from crowdnal.data import Annotations
from crowdnal.objectives._bases.confusions import ConfusionOptions, MixtureObjective, Scope, annotators_in
from crowdnal.objectives._registry import register


@register("trace", link="p A_r, trace(A_r) minimised", source="Tanno et al. 2019")
class TraceRegularized(MixtureObjective):
    """``-log Σ_k p[k] A_r[k, y]`` of each label, plus ``trace_weight`` times the mean trace of all ``A_r``.

    The trace is *minimised*: of all confusions that explain the labels, those of the smallest trace are the
    true ones if the mean confusion is diagonally dominant (theorem 1). ``A_r`` is the softplus of a free
    matrix (initialised to 6I - 5), normalised over the observed labels.

    Where the authors' code differs: it sums the loss over an item's annotators and averages over items, which is
    ``reduction="per_item"`` with the same ``trace_weight`` (``"sum"`` is B times as much, and needs ``trace_weight``
    times B), and clips the mixture to [1e-10, 1), so that a confidently contradicted label has no gradient; here the
    mean is over annotations and all is in the log domain without a clip. The published numbers used theirs, with
    ``trace_weight=0.01`` and no warm-up. Equation 4 adds λ Σ_r trace(A_r) to the sum over all N items: for its λ,
    ``reduction="per_item"`` with ``trace_weight = λ R / N``.

    Args:
        trace_weight: λ, 0 or more.
        normalization: ``"softplus"`` (the paper) or ``"softmax"`` (found in other implementations; with a ``rank`` the
            only one).
        warmup_epochs: epochs in which the trace is *maximised*, so that confusions are diagonal first; from the
            follow-up on segmentation (Zhang et al., NeurIPS 2020), not from this paper. Needs
            ``on_epoch_start(epoch)``.
        scope: mean trace over ``"all"`` annotators (the paper; the cost of a step grows with R) or over those
            who label something in the ``"batch"``.
        sparse_grad: sparse gradients for the confusions, as :func:`crowdnal.functional.crowd_mixture_nll` does;
            full rank only, needs ``scope="batch"`` (or ``trace_weight=0``) and `torch.optim.SparseAdam` or SGD.
    """

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        trace_weight: float = 0.01, normalization: Normalization = "softplus", warmup_epochs: int = 0,
        scope: Scope = "all", sparse_grad: bool = False, **common: Unpack[ConfusionOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, **common)
        check_amount("the trace is minimised", trace_weight=trace_weight)
        check_integer(0, warmup_epochs=warmup_epochs)
        check_choice(Scope, scope=scope)
        if sparse_grad and scope == "all" and trace_weight > 0:
            raise ValueError("sparse_grad=True needs scope='batch': the trace of all annotators has a dense gradient")
        self.sparse_grad = sparse_grad
        self.trace_weight = trace_weight
        self.warmup_epochs = warmup_epochs
        self.scope: Scope = scope
        self.annotators = self.stochastic_matrices(normalization, sparse_grad=sparse_grad)
        # a flag and not the epoch: torch.compile would compile anew for every epoch
        self._in_warmup: bool | None = None

    @override
    def on_epoch_start(self, epoch: int) -> None:
        self._in_warmup = epoch < self.warmup_epochs

    @override
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
