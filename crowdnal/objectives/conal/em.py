"""CoNAL by EM: Chu, Ma & Wang, Learning from Crowds by Modeling Common Confusions, 2021, appendix B."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor
from typing_extensions import override

from crowdnal import metrics
from crowdnal._utils.options import check_amount, check_choice
from crowdnal.aggregation import posterior
from crowdnal.aggregation.common_confusion import CommonConfusionEM, Omega
from crowdnal.data import Annotations
from crowdnal.objectives._bases.batch import Batch
from crowdnal.objectives._bases.rounds import RoundsObjective, RoundsOptions
from crowdnal.objectives._bases.run_state import of_run
from crowdnal.objectives._registry import register


@register("conal-em", link="conal's by EM, the classifier as the prior", source="Chu et al. 2021, app. B")
class CoNALEM(RoundsObjective):
    """The labels of true class c come from ``ω common[c] + (1 - ω) confusion_r[c]``; the classifier is the prior.

    A round is an E-step with the classifier's predictions, whose posterior is what the classifier is trained on until
    the next round, and the closed forms for ω and both confusions: :func:`crowdnal.conal_em` says what they are, where
    the paper differs and their init. The paper calls this variant slow and sensitive to its init, and has no
    numbers for it. Needs the hooks, as every :class:`RoundsObjective` does.

    Where no item has two labels nothing tells how often labels are right: everything stays as the votes say.

    Args:
        omega: one for each ``"annotator"``, or for each ``"annotation"`` (the paper), which goes to 0 or 1 as nothing
            else informs it; labels that were not trained on then have their annotator's mean.
        smoothing: pseudo-count of every cell of every confusion, 0 or more.
    """

    stored = ("targets", "annotation_omega")

    common: Tensor
    individual: Tensor
    omega: Tensor
    annotation_omega: Tensor = of_run("annotation_omega")

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        omega: Omega = "annotator", smoothing: float = 0.1, **common: Unpack[RoundsOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, **common)
        self.require_a_label_per_class("CoNALEM, which is initialised by the votes,")
        check_choice(Omega, omega=omega)
        check_amount(smoothing=smoothing)
        self.per: Omega = omega
        self.smoothing = smoothing
        # [K, C] and [R, K, C], the observed label outermost; ω [R], and [nnz] of the training set
        even = torch.full((num_annotators, self.num_labels, num_classes), 1 / self.num_labels)
        self.register_buffer("common", even[0].clone())
        self.register_buffer("individual", even)
        self.register_buffer("omega", torch.full((num_annotators,), 0.5))
        self.annotation_omega = torch.zeros(0)

    @override
    def confusion(self) -> Tensor:
        """``[R, C, K]``: the individual ones."""
        return self.individual.transpose(1, 2).clone()

    def reliability(self) -> Tensor:
        """``[R]``: of what labels come from, ``ω common + (1 - ω) individual``: the individual ones hold the rest."""
        mixed = self._mixed(torch.promote_types(self.omega.dtype, torch.float32))
        return metrics.balanced_accuracy(mixed.diagonal(dim1=1, dim2=2), self.num_classes)

    def common_confusion(self) -> Tensor:
        """``[C, K]``: the common one."""
        return self.common.t().clone()

    def _init_targets(self, annotations: Annotations) -> None:
        super()._init_targets(annotations)
        em = CommonConfusionEM(annotations, None, self.per, self.smoothing, torch.float64, self.num_classes)
        em.maximise()
        self._keep(em)

    def _round(self, batch: Batch) -> float:
        annotations = batch.annotations
        em = CommonConfusionEM(annotations, batch.logits.double(), self.per, self.smoothing, torch.float64)
        em.common, em.own = self.common.double(), self.individual.double()
        per_annotation = self.annotation_omega if self.per == "annotation" else self.omega[annotations.annotator]
        em.omega = per_annotation.double()
        likelihood = em.expect()
        self._set_targets(em.posterior)
        if bool((annotations.counts > 1).any()):
            em.maximise()
            self._keep(em)
        return likelihood

    def _keep(self, em: CommonConfusionEM) -> None:
        self.common.copy_(em.common)
        self.individual.copy_(em.own)
        self.omega.copy_(em.annotator_source(em.omega))
        if self.per == "annotation":
            self.annotation_omega = em.omega.to(self.omega)

    def _mixed(self, dtype: torch.dtype) -> Tensor:
        """``[R, K, C]``: the confusions of labels of which only the annotator is known."""
        omega = self.omega.to(dtype).view(-1, 1, 1)
        return omega * self.common.to(dtype) + (1 - omega) * self.individual.to(dtype)

    def _nll(self, batch: Batch) -> Tensor:
        return batch.mixture_nll(self._mixed(batch.logits.dtype).log(), "none")

    def _posterior(self, batch: Batch) -> Tensor:
        confusion = self._mixed(batch.logits.dtype).transpose(1, 2)
        return posterior(batch.logits.log_softmax(-1), confusion, batch.annotations)
