"""What EM on the joint link consists of: E-step, closed forms of the M-step, known labels, pseudo-counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from crowdnal.data import Annotations
from crowdnal.functional import em_step
from crowdnal.functional.segments import annotation_weight, sum_rows

FLOOR = 1e-10
"""Least expected count of a label that an annotator gave, and least probability of a class that is in play."""


@dataclass
class DawidSkeneResult:
    """What `dawid_skene` found; the posterior is the E-step's under `confusion` and `class_prior`.

    Attributes:
        posterior: ``[N, C]``, rows sum to 1. An item without annotations has the class prior.
        confusion: ``[R, C, K]``, row = true class, rows sum to 1.
        class_prior: ``[C]``.
        log_likelihood: of the annotations (and known labels), after every iteration.
        objective: what EM maximises, after every iteration: the log-likelihood plus, where there are pseudo-counts,
            their log-density up to a constant.
        converged: whether the last step was smaller than the tolerance.
    """

    posterior: Tensor
    confusion: Tensor
    class_prior: Tensor
    log_likelihood: list[float]
    objective: list[float]
    converged: bool

    @property
    def labels(self) -> Tensor:
        """``[N]`` most probable class; the lowest of equally probable ones."""
        return self.posterior.argmax(1)


class EMState:
    """`posterior` [N, C], its `counts` [R, K, C] and `totals` [C]; `log_confusion` [R, K, C] and `class_prior` [C]."""

    def __init__(
        self,
        annotations: Annotations,
        gold: Tensor | None,
        initial: Tensor | None,
        prior: Tensor | None,
        smoothing: float,
        dtype: torch.dtype,
    ) -> None:
        labels, annotators = annotations.num_classes, annotations.num_annotators
        classes = labels if initial is None else classes_of(initial, annotators, labels)
        check_options(annotations, classes, gold, prior, smoothing, dtype)
        self.annotations, self.gold = annotations, None if gold is None else gold.to(annotations.device)
        self.weight = annotation_weight(annotations, None, dtype)
        self.total = float(annotations.num_annotations if self.weight is None else self.weight.sum()) or 1.0
        # known classes that em_step has no likelihood of (no labels), and that it does not count (no weight either)
        self.unlabelled = self.uncounted = None
        if self.gold is not None:
            counted = annotations.counts > 0 if self.weight is None else sum_rows(self.weight, annotations) > 0
            self.unlabelled = self.gold[(self.gold >= 0) & (annotations.counts == 0)]
            self.uncounted = self.gold[(self.gold >= 0) & ~counted]
        self.log_confusion = torch.zeros(annotators, labels, classes, dtype=dtype, device=annotations.device)
        self.pseudo_counts = pseudo_counts_of(prior, smoothing, self.log_confusion)
        if classes == labels:
            self._step(None)  # the votes' shares
        else:
            self._step(self.log_confusion.new_zeros(1, classes))
        if self.gold is not None:
            only = possible(self.gold, classes).to(dtype)
            self._step(torch.where((self.gold >= 0).unsqueeze(1), only, self.posterior).log())
        self.class_prior = self._mean_posterior()
        self.in_play = self.class_prior > 0
        if initial is not None:
            self.in_play = torch.ones_like(self.in_play)
            self.log_confusion = initial.to(self.log_confusion).transpose(1, 2).clamp(min=FLOOR).log().contiguous()
            self.class_prior = self.class_prior.clamp(min=FLOOR)

    def maximise(self) -> None:
        """M-step: class prior and confusions from posterior and counts."""
        self.log_confusion = self._log_confusion()
        self.class_prior = torch.where(self.in_play, self._mean_posterior().clamp(min=FLOOR), 0)

    def expect(self) -> tuple[float, float]:
        """E-step; returns the log-likelihood and the log-density of the pseudo-counts."""
        log_prior = self.class_prior.log()
        likelihood, penalty = 0.0, 0.0
        if self.gold is None:
            loss = self._step(log_prior.unsqueeze(0))
        else:
            loss = self._step(torch.where(possible(self.gold, len(log_prior)), log_prior, -math.inf))
            likelihood = float(log_prior[self.unlabelled].sum())
        if self.pseudo_counts is not None:
            penalty = self._log_density(self.pseudo_counts)
        return likelihood - loss, penalty

    def _log_confusion(self) -> Tensor:
        """Of the M-step, [R, K, C]."""
        return log_shares(self.counts, self.pseudo_counts)

    def _log_density(self, pseudo_counts: Tensor) -> float:
        """Of the pseudo-counts."""
        return float(torch.where(pseudo_counts > 0, pseudo_counts * self.log_confusion, 0).sum())

    def _step(self, log_prior: Tensor | None) -> float:
        """Posterior and counts, by a single pass over the annotations; returns the negative log-likelihood."""
        loss, self.posterior, self.counts, self.totals = em_step(
            log_prior, self.log_confusion, self.weight, self.annotations
        )
        return float(loss)

    def _mean_posterior(self) -> Tensor:
        """[C], over the items that say something about it: labelled, or known. Uniform if there are none."""
        totals = self.totals
        if self.uncounted is not None:
            totals = totals + torch.bincount(self.uncounted, minlength=len(totals))
        total = totals.sum()
        return torch.where(total > 0, totals / torch.where(total > 0, total, 1), 1 / len(totals))


def run(em: EMState, max_iterations: int, tolerance: float, *, start_given: bool = False) -> DawidSkeneResult:
    """M-steps and E-steps until the objective rises by less than the tolerance; with a start, an E-step first."""
    if max_iterations < 1:
        raise ValueError(f"max_iterations must be 1 or more, got {max_iterations}")
    if math.isnan(tolerance):
        raise ValueError("tolerance must be a number, got NaN; a negative one never stops")
    likelihoods: list[float] = []
    objectives: list[float] = []
    converged = False
    while len(objectives) < max_iterations and not converged:
        if objectives or not start_given:
            em.maximise()
        likelihood, penalty = em.expect()
        likelihoods.append(likelihood)
        objectives.append(likelihood + penalty)
        converged = len(objectives) > 1 and objectives[-1] - objectives[-2] < tolerance * em.total
    confusion = em.log_confusion.exp().transpose(1, 2).contiguous()
    return DawidSkeneResult(em.posterior, confusion, em.class_prior, likelihoods, objectives, converged)


def log_shares(counts: Tensor, pseudo_counts: Tensor | None) -> Tensor:
    """Log of expected counts [R, K, C], plus pseudo-counts, as distributions over K: the confusions of an M-step.

    A label that an annotator gave counts FLOOR at least; one they never gave is impossible; nothing at all is uniform.
    """
    gave = counts.sum(2, keepdim=True) > 0
    counts = counts if pseudo_counts is None else counts + pseudo_counts
    counts = torch.where(gave, counts.clamp(min=FLOOR), counts)
    total = counts.sum(1, keepdim=True)
    return torch.where(total > 0, counts / torch.where(total > 0, total, 1), 1 / counts.shape[1]).log_()


def possible(gold: Tensor, classes: int) -> Tensor:
    """[N, C]: the known class alone, every class where it is unknown."""
    return (gold.unsqueeze(1) == torch.arange(classes, device=gold.device)) | (gold < 0).unsqueeze(1)


def pseudo_counts_of(prior: Tensor | None, smoothing: float, like: Tensor) -> Tensor | None:
    """[R, K, C] or what broadcasts to it, or None."""
    if prior is None:
        return like.new_full((1, 1, 1), smoothing) if smoothing > 0 else None
    return prior.to(like).transpose(-1, -2) + smoothing


def classes_of(initial: Tensor, annotators: int, labels: int) -> int:
    if initial.dim() != 3 or initial.shape[0] != annotators or initial.shape[2] != labels or initial.shape[1] == 0:
        raise ValueError(
            f"initial_confusion has shape {tuple(initial.shape)} but must be [R, C, K] = ({annotators}, C, {labels}): "
            "a row for each true class"
        )
    if not bool(((initial >= 0) & (initial.sum(2, keepdim=True) - 1).abs().lt(1e-2)).all()):
        raise ValueError("initial_confusion has a row that is no distribution; normalise over the last dimension")
    return initial.shape[1]


def check_options(
    annotations: Annotations,
    classes: int,
    gold: Tensor | None,
    prior: Tensor | None,
    smoothing: float,
    dtype: torch.dtype,
) -> None:
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(f"dtype must be torch.float64 or torch.float32, got {dtype}")
    check_smoothing(smoothing)
    if gold is not None:
        check_gold(gold, classes, annotations.num_items)
    if prior is not None:
        check_prior(prior, annotations.num_annotators, classes, annotations.num_classes)


def check_smoothing(smoothing: float) -> None:
    if not 0 <= smoothing < math.inf:
        raise ValueError(f"smoothing must be finite and not negative, got {smoothing}")


def check_gold(gold: Tensor, classes: int, items: int | None = None) -> None:
    wrong_size = gold.dim() != 1 or (items is not None and len(gold) != items)
    if wrong_size or gold.is_floating_point() or gold.dtype == torch.bool:
        number = "" if items is None else f" for N = {items} items"
        raise ValueError(f"gold must be [N] integers{number}, got {gold.dtype} {list(gold.shape)}")
    bad = (gold < -1) | (gold >= classes)
    if bool(bad.any()):
        i = int(bad.nonzero()[0, 0])
        raise ValueError(f"gold[{i}] is {int(gold[i])}, outside [0, {classes}); mark unknown classes with -1")


def check_prior(prior: Tensor, annotators: int, classes: int, labels: int) -> None:
    matrix = (classes, labels)
    if tuple(prior.shape) not in (matrix, (annotators, *matrix)):
        raise ValueError(
            f"confusion_prior has shape {tuple(prior.shape)} but must be [C, K] = {matrix} or one for each of "
            f"{annotators} annotators"
        )
    if not bool(((prior >= 0) & prior.isfinite()).all()):
        raise ValueError("confusion_prior must hold pseudo-counts, finite and not negative")
