"""EM where a label comes from a confusion that all share or from the annotator's own: CoNAL's EM variant."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from crowdnal._utils.probability import proportions
from crowdnal.aggregation._votes import vote_proportions
from crowdnal.aggregation.em import FLOOR, check_options, weights_of
from crowdnal.data import Annotations, of_classes
from crowdnal.functional import segment_sum
from crowdnal.functional.segments import scatter_rows

Omega = Literal["annotation", "annotator"]


class CommonConfusionEM:
    """`posterior` [N, C] and `source` [nnz, C] given each class; `common` [K, C], `own` [R, K, C], `omega` [nnz].

    The arguments are those of :func:`crowdnal.conal_em`, where the model is described, and ``num_classes``: C, where
    there are labels behind the classes, which are no votes.
    """

    def __init__(
        self, annotations: Annotations, log_prior: Tensor | None, per: Omega, smoothing: float, dtype: torch.dtype,
        num_classes: int | None = None,
    ) -> None:  # fmt: skip
        a = self.annotations = annotations
        _check(a, log_prior, per, smoothing, dtype)
        self.per, self.smoothing = per, smoothing
        self.weight, self.total = weights_of(a, dtype)
        self.log_prior = None if log_prior is None else log_prior.to(dtype).log_softmax(1)
        # annotations by label, and by annotator and label: sums in a fixed order
        self.cell = a.annotator * a.num_classes + a.label
        self.by_label, self.by_cell = a.label.argsort(stable=True), self.cell.argsort(stable=True)
        if self.log_prior is not None and self.log_prior.shape[1] != a.num_classes:
            self.posterior = self.log_prior.exp()
        else:
            classes = a.num_classes if num_classes is None else num_classes
            self.posterior = vote_proportions(of_classes(a, classes), classes).to(dtype)
        self.source = self.posterior.new_full((a.num_annotations, self.posterior.shape[1]), 0.5)

    def maximise(self) -> None:
        """M-step: the closed forms for omega and both confusions (and the class prior)."""
        a, mine = self.annotations, self.posterior[self.annotations.item]
        if self.weight is not None:
            mine = mine * self.weight.unsqueeze(1)
        together = mine * self.source
        common = scatter_rows(together, a.label, self.by_label, a.num_classes)
        self.common = proportions(common + self.smoothing, -2, FLOOR)
        cells = scatter_rows(mine - together, self.cell, self.by_cell, a.num_annotators * a.num_classes)
        own = cells.view(a.num_annotators, a.num_classes, mine.shape[1])
        self.own = proportions(own + self.smoothing, -2, FLOOR)
        self.omega = self.mean_source()
        if self.per == "annotator":
            self.omega = self.annotator_source(self.omega)[a.annotator]
        answered = self.posterior[a.counts > 0]
        self.class_prior = answered.mean(0) if len(answered) else self.posterior.new_full((mine.shape[1],), 1.0)
        self.class_prior = self.class_prior.clamp(min=FLOOR)
        self.class_prior = self.class_prior / self.class_prior.sum()

    def expect(self) -> float:
        """E-step: the posterior, and the source of each annotation given each class; returns the log-likelihood."""
        a, omega = self.annotations, self.omega.unsqueeze(1)
        together = omega * self.common[a.label]
        both = together + (1 - omega) * self.own[a.annotator, a.label]
        self.source = together / both
        evidence = both.log() if self.weight is None else both.log() * self.weight.unsqueeze(1)
        prior = self.class_prior.log() if self.log_prior is None else self.log_prior
        joint = prior + segment_sum(evidence, a)
        self.posterior = joint.softmax(1)
        return float(joint.logsumexp(1).sum())

    def mean_source(self) -> Tensor:
        """``[nnz]``, over the posterior of the item's class."""
        # by rounding a posterior may sum to more than 1; 1 - omega below 0 would grow, as omega = 1 repels
        return (self.posterior[self.annotations.item] * self.source).sum(1).clamp(0, 1)

    def annotator_source(self, source: Tensor) -> Tensor:
        """``[R]``, the mean of ``source [nnz]`` over each annotator's labels; 1/2 without any."""
        a, weight = self.annotations, torch.ones_like(source) if self.weight is None else self.weight
        sums = scatter_rows(torch.stack([weight * source, weight], 1), a.annotator, a.order, a.num_annotators)
        labelled = sums[:, 1] > 0
        return torch.where(labelled, sums[:, 0] / sums[:, 1].where(labelled, 1.0), 0.5)


def _check(
    annotations: Annotations, log_prior: Tensor | None, omega: str, smoothing: float, dtype: torch.dtype
) -> None:
    if omega not in get_args(Omega):
        raise ValueError(f"omega={omega!r} is unknown: use 'annotation' or 'annotator'")
    check_options(annotations, annotations.num_classes, None, None, smoothing, dtype)
    if log_prior is not None and (log_prior.dim() != 2 or log_prior.shape[0] != annotations.num_items):
        raise ValueError(
            f"log_prior has shape {tuple(log_prior.shape)} but must be [N, C] with N={annotations.num_items} items"
        )
