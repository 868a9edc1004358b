"""CoNAL by EM: Chu, Ma & Wang, Learning from Crowds by Modeling Common Confusions, 2021, appendix B."""

from __future__ import annotations

from typing import ClassVar, get_args

import torch
from torch import Tensor

from crowdnal import metrics
from crowdnal.aggregation import posterior
from crowdnal.aggregation.common_confusion import CommonConfusionEM, Omega
from crowdnal.data import Annotations
from crowdnal.functional import Reduction, crowd_mixture_nll
from crowdnal.objectives._bases.rounds import RoundsObjective


class CoNALEM(RoundsObjective):
    """The labels of true class c come from ``ω common[c] + (1 - ω) confusion_r[c]``; the classifier is the prior.

    A round is an E-step with the classifier's predictions, whose posterior is what the classifier is trained on until
    the next round, and the closed forms for ω and both confusions: :func:`crowdnal.conal_em` says what they are, where
    the paper differs and how they start. The paper calls this variant slow and sensitive to its start, and has no
    numbers for it. Needs the hooks, as every :class:`RoundsObjective` does.

    Args:
        omega: one for each ``"annotator"``, or for each ``"annotation"`` (the paper), which goes to 0 or 1 as nothing
            else informs it; labels that were not trained on then have their annotator's mean.
        smoothing: pseudo-count of every cell of every confusion, 0 or more.
        epochs_per_round: 1 or more.
    """

    name: ClassVar[str] = "conal-em"
    resizable = ("targets", "annotation_omega")

    common: Tensor
    individual: Tensor
    omega: Tensor
    annotation_omega: Tensor

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        num_labels: int | None = None,
        reduction: Reduction = "mean",
        omega: Omega = "annotator",
        smoothing: float = 0.1,
        epochs_per_round: int = 1,
    ) -> None:
        super().__init__(
            num_classes, num_annotators, num_labels=num_labels, reduction=reduction, epochs_per_round=epochs_per_round
        )
        self._needs_square("CoNALEM, which starts from the votes,")
        if omega not in get_args(Omega):
            raise ValueError(f"omega={omega!r} is unknown: use 'annotator' or 'annotation'")
        if not 0 <= smoothing < float("inf"):
            raise ValueError(f"smoothing={smoothing!r} must be finite and not negative")
        self.per: Omega = omega
        self.smoothing = smoothing
        # [K, C] and [R, K, C], the observed label outermost; ω [R], and [nnz] of the training set
        even = torch.full((num_annotators, num_classes, num_classes), 1 / num_classes)
        self.register_buffer("common", even[0].clone())
        self.register_buffer("individual", even)
        self.register_buffer("omega", torch.full((num_annotators,), 0.5))
        self.register_buffer("annotation_omega", torch.zeros(0))

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

    def _start(self) -> None:
        super()._start()
        assert self._annotations is not None
        em = CommonConfusionEM(self._annotations, None, self.per, self.smoothing, torch.float64)
        em.maximise()
        self._keep(em)

    def _round(self, logits: Tensor, annotations: Annotations, features: Tensor | None) -> float:
        em = CommonConfusionEM(annotations, logits.double(), self.per, self.smoothing, torch.float64)
        em.common, em.own = self.common.double(), self.individual.double()
        per_annotation = self.annotation_omega if self.per == "annotation" else self.omega[annotations.annotator]
        em.omega = per_annotation.double()
        likelihood = em.expect()
        self._set_targets(em.posterior)
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

    def _nll(
        self,
        logits: Tensor,
        annotations: Annotations,
        features: Tensor | None,
        weight: Tensor | None,
        reduction: Reduction,
    ) -> Tensor:
        log_confusion = self._mixed(logits.dtype).log()
        return crowd_mixture_nll(
            logits.log_softmax(-1), log_confusion, annotations, normalization="none", weight=weight, reduction=reduction
        )

    def _posterior(self, logits: Tensor, annotations: Annotations, features: Tensor | None) -> Tensor:
        return posterior(logits.log_softmax(-1), self._mixed(logits.dtype).transpose(1, 2), annotations)
