"""The EM variant of CoNAL: Chu, Ma & Wang, Learning from Crowds by Modeling Common Confusions, 2021, appendix B."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from crowdnal.data import Annotations
from crowdnal.functional import segment_sum
from crowdnal.functional.segments import annotation_weight, scatter_rows

__all__ = ["CoNALEMResult", "conal_em"]

Omega = Literal["annotation", "annotator"]
FLOOR = 1e-10
"""Least probability of a label under a confusion, and of a class."""


@dataclass
class CoNALEMResult:
    """What `conal_em` found.

    Attributes:
        posterior: ``[N, C]`` over true classes, rows sum to 1.
        common: ``[C, K]`` confusion that all annotators share, rows sum to 1.
        confusion: ``[R, C, K]`` their own.
        source: ``[nnz]`` probability of each annotation, given its label, to come from the common confusion.
        class_prior: ``[C]``; the mean posterior where ``log_prior`` was given.
        log_likelihood: of the annotations, after every iteration.
        converged: whether the last step was smaller than the tolerance.
    """

    posterior: Tensor
    common: Tensor
    confusion: Tensor
    source: Tensor
    class_prior: Tensor
    log_likelihood: list[float]
    converged: bool

    @property
    def labels(self) -> Tensor:
        """``[N]`` most probable class; the lowest of equally probable ones."""
        return self.posterior.argmax(1)


@torch.no_grad()
def conal_em(
    annotations: Annotations,
    *,
    log_prior: Tensor | None = None,
    omega: Omega = "annotation",
    max_iterations: int = 100,
    tolerance: float = 1e-5,
    smoothing: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> CoNALEMResult:
    """True labels, common and individual confusions by EM, with the closed forms of the paper's M-step.

    A label of a true class c comes from ``omega common[c] + (1 - omega) confusion_r[c]``. The E-step is exact: it
    keeps the source given *each* class, so that the likelihood never falls (with ``smoothing=0``); the paper writes its
    source for one class. Then ``omega`` is the mean of the source, and the confusions are the expected shares of the
    labels.

    Starts from the shares of the votes and ``omega = 1/2``. To alternate with a classifier, as the paper does, train it
    on ``posterior`` and give its log-probabilities as ``log_prior`` to the next call.

    Args:
        annotations: the whole data set. A weight says how often its annotation counts.
        log_prior: ``[N, C]`` log-probabilities of a classifier, instead of a class prior; needed for C != K.
        omega: one for each ``"annotation"`` (the paper), which goes to 0 or 1 in the end as nothing else informs it, or
            one for each ``"annotator"``.
        max_iterations: 1 or more.
        tolerance: stop when the log-likelihood rises by less than this per annotation; a negative one never stops.
        smoothing: pseudo-count added to every cell of every confusion.
        dtype: of the computation and the result, float64 or float32.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    _check(annotations, log_prior, omega, max_iterations, tolerance, smoothing, dtype)
    em = State(annotations, log_prior, omega, smoothing, dtype)
    likelihoods: list[float] = []
    converged = False
    while len(likelihoods) < max_iterations and not converged:
        em.maximise()
        likelihoods.append(em.expect())
        converged = len(likelihoods) > 1 and likelihoods[-1] - likelihoods[-2] < tolerance * em.total
    return CoNALEMResult(
        em.posterior,
        em.common.t().contiguous(),
        em.own.transpose(1, 2).contiguous(),
        em.mean_source(),
        em.class_prior,
        likelihoods,
        converged,
    )


class State:
    """`posterior` [N, C] and `source` [nnz, C] given each class; `common` [K, C], `own` [R, K, C], `omega` [nnz]."""

    def __init__(
        self, annotations: Annotations, log_prior: Tensor | None, per: Omega, smoothing: float, dtype: torch.dtype
    ) -> None:
        a = self.annotations = annotations
        self.per, self.smoothing = per, smoothing
        self.weight = annotation_weight(a, None, dtype)
        self.total = float(a.num_annotations if self.weight is None else self.weight.sum()) or 1.0
        self.log_prior = None if log_prior is None else log_prior.to(dtype).log_softmax(1)
        # annotations by label, and by annotator and label: sums in a fixed order
        self.cell = a.annotator * a.num_classes + a.label
        self.by_label, self.by_cell = a.label.argsort(stable=True), self.cell.argsort(stable=True)
        if self.log_prior is not None and self.log_prior.shape[1] != a.num_classes:
            self.posterior = self.log_prior.exp()
        else:
            votes = a.votes().to(dtype)
            even = torch.full_like(votes, 1 / votes.shape[1])
            self.posterior = torch.where(votes.sum(1, keepdim=True) > 0, votes, even)
            self.posterior = self.posterior / self.posterior.sum(1, keepdim=True)
        self.source = self.posterior.new_full((a.num_annotations, self.posterior.shape[1]), 0.5)

    def maximise(self) -> None:
        """M-step: the closed forms for omega and both confusions (and the class prior)."""
        a, mine = self.annotations, self.posterior[self.annotations.item]
        if self.weight is not None:
            mine = mine * self.weight.unsqueeze(1)
        together = mine * self.source
        self.common = self._shares(scatter_rows(together, a.label, self.by_label, a.num_classes))
        cells = scatter_rows(mine - together, self.cell, self.by_cell, a.num_annotators * a.num_classes)
        self.own = self._shares(cells.view(a.num_annotators, a.num_classes, -1))
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
        return (self.posterior[self.annotations.item] * self.source).sum(1)

    def annotator_source(self, source: Tensor) -> Tensor:
        """``[R]``, the mean of ``source [nnz]`` over each annotator's labels; 1/2 without any."""
        a, weight = self.annotations, torch.ones_like(source) if self.weight is None else self.weight
        sums = scatter_rows(torch.stack([weight * source, weight], 1), a.annotator, a.order, a.num_annotators)
        labelled = sums[:, 1] > 0
        return torch.where(labelled, sums[:, 0] / sums[:, 1].where(labelled, 1.0), 0.5)

    def _shares(self, counts: Tensor) -> Tensor:
        """Expected counts [..., K, C] as a distribution over labels for each class; uniform where there are none."""
        counts = counts + self.smoothing
        total = counts.sum(-2, keepdim=True)
        shares = torch.where(total > 0, counts / torch.where(total > 0, total, 1.0), 1 / counts.shape[-2])
        shares = shares.clamp(min=FLOOR)
        return shares / shares.sum(-2, keepdim=True)


def _check(
    annotations: Annotations,
    log_prior: Tensor | None,
    omega: str,
    max_iterations: int,
    tolerance: float,
    smoothing: float,
    dtype: torch.dtype,
) -> None:
    if omega not in get_args(Omega):
        raise ValueError(f"omega={omega!r} is unknown: use 'annotation' or 'annotator'")
    if max_iterations < 1:
        raise ValueError(f"max_iterations must be 1 or more, got {max_iterations}")
    if math.isnan(tolerance):
        raise ValueError("tolerance must be a number, got NaN; a negative one never stops")
    if not 0 <= smoothing < math.inf:
        raise ValueError(f"smoothing must be finite and not negative, got {smoothing}")
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(f"dtype must be torch.float64 or torch.float32, got {dtype}")
    if log_prior is not None and (log_prior.dim() != 2 or log_prior.shape[0] != annotations.num_items):
        raise ValueError(
            f"log_prior has shape {tuple(log_prior.shape)} but must be [N, C] with N={annotations.num_items} items"
        )
