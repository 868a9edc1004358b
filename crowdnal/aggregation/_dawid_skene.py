"""Dawid-Skene: true labels and annotators' confusions from annotations alone, by EM on the joint link."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crowdnal._utils.options import typed
from crowdnal._utils.probability import proportions
from crowdnal.aggregation.em import (
    FLOOR,
    STRENGTHS,
    AggregationResult,
    Prior,
    check_options,
    classes_of,
    crowd_or_right,
    crowd_strength,
    iterate,
    log_proportions,
    possible,
    pseudo_counts_of,
    say_collapse,
    weights_of,
)
from crowdnal.data import Annotations, as_gold
from crowdnal.functional import em_step
from crowdnal.functional.segments import sum_rows


@dataclass
class DawidSkeneResult(AggregationResult):
    """What `dawid_skene` found; the posterior is the E-step's under `confusion` and `class_prior`.

    Attributes:
        posterior: ``[N, C]``, rows sum to 1. An item without annotations has the class prior.
        confusion: ``[R, C, K]``, row = true class, rows sum to 1.
        class_prior: ``[C]``.
        log_likelihood: of the annotations (and known labels), after every iteration.
        objective: what EM maximises, after every iteration: the log-likelihood plus, where there are pseudo-counts,
            their log-density up to a constant.
        converged: whether the last step was smaller than the tolerance.
        pseudo_counts: ``[C, K]`` or ``[R, C, K]``, the prior of the confusions, without ``smoothing``; None: none.
    """

    posterior: Tensor
    confusion: Tensor
    class_prior: Tensor
    log_likelihood: list[float]
    objective: list[float]
    converged: bool
    pseudo_counts: Tensor | None = None


@typed
@torch.no_grad()
def dawid_skene(
    annotations: Annotations,
    *,
    max_iterations: int = 100,
    tolerance: float = 1e-5,
    smoothing: float = 0.0,
    gold: Any = None,
    initial_confusion: Tensor | None = None,
    confusion_prior: Prior = "crowd",
    dtype: torch.dtype = torch.float64,
) -> DawidSkeneResult:
    """Maximum a posteriori, or maximum likelihood, of the model of Dawid & Skene (1979).

    The paper maximises the likelihood: ``confusion_prior=None``. Where annotators gave few labels each that is worse
    than the votes, down to one class for everything. So by default each row of an annotator's confusion has a
    Dirichlet prior around the crowd's, as in the hierarchical models of Kim & Ghahramani (2012) and Venanzi et al.
    (2014): its mean is counted against the votes, and its strength, 1 to 20 labels, is the one of greatest evidence
    given the posteriors, found in at most three runs.

    Starts from the vote proportions (the paper's eq. 3.1) and alternates M-step (eq. 2.3 and 2.4) and E-step
    (eq. 2.5), all items at once, in log space and with every sum in a fixed order. A label that an annotator never
    gave has probability 0; one that they gave, but never to a class, counts 1e-10 there: so the row of a class that an
    annotator never met is uniform over their labels, and that of an annotator without annotations over all labels. A
    class without a single vote stays impossible.

    Args:
        annotations: the whole data set. A weight says how often its annotation counts.
        max_iterations: of an M-step and an E-step each, 1 or more.
        tolerance: stop when the objective rises by less than this per annotation; a negative one never stops.
        smoothing: pseudo-count added to every cell of every confusion.
        gold: known true classes, as :func:`crowdnal.data.as_gold` takes them. They hold throughout.
        initial_confusion: ``[R, C, K]``, **init only**: the first iteration is an E-step with it instead of the votes.
            It alone allows C != K.
        confusion_prior: ``[C, K]`` or ``[R, C, K]`` pseudo-counts, **held** in every M-step (a Dirichlet prior with
            these numbers plus 1); or a number: so many labels of each class in the crowd's proportions; ``"crowd"``:
            as many as suit it (neither where C != K); or None.
        dtype: of the computation and the result, float64 or float32.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    initialised = initial_confusion is not None
    prior = STRENGTHS[-1] if isinstance(confusion_prior, str) and confusion_prior == "crowd" else confusion_prior
    for _ in range(3):
        em = EMState(annotations, gold, initial_confusion, prior, smoothing, dtype)
        found = run(em, max_iterations, tolerance, initialised=initialised)
        if prior is confusion_prior or em.crowd is None:
            break
        better = crowd_strength(em.counts, em.crowd)
        if better == prior:
            break
        prior = better
    say_collapse(found.posterior, annotations, "dawid_skene")
    return found


class EMState:
    """`posterior` [N, C], its `counts` [R, K, C] and `totals` [C]; `log_confusion` [R, K, C] and `class_prior` [C]."""

    def __init__(
        self,
        annotations: Annotations,
        gold: Any,
        initial: Tensor | None,
        prior: Prior,
        smoothing: float,
        dtype: torch.dtype,
    ) -> None:
        labels, annotators = annotations.num_classes, annotations.num_annotators
        classes = labels if initial is None else classes_of(initial, annotators, labels)
        gold = None if gold is None else as_gold(gold, annotations, classes)
        check_options(annotations, classes, gold, prior, smoothing, dtype)
        self.annotations, self.gold = annotations, None if gold is None else gold.to(annotations.device)
        self.weight, self.total = weights_of(annotations, dtype)
        # known classes that em_step has no likelihood of (no labels), and that it does not count (no weight either)
        self.unlabelled = self.uncounted = None
        if self.gold is not None:
            counted = annotations.counts > 0 if self.weight is None else sum_rows(self.weight, annotations) > 0
            self.unlabelled = self.gold[(self.gold >= 0) & (annotations.counts == 0)]
            self.uncounted = self.gold[(self.gold >= 0) & ~counted]
        self.log_confusion = torch.zeros(annotators, labels, classes, dtype=dtype, device=annotations.device)
        if classes == labels:
            self._step(None)  # the vote proportions
        else:
            self._step(self.log_confusion.new_zeros(1, classes))
        if self.gold is not None:
            only = possible(self.gold, classes).to(dtype)
            self._step(torch.where((self.gold >= 0).unsqueeze(1), only, self.posterior).log())
        self.crowd: Tensor | None = None
        if isinstance(prior, float | int):
            if classes == labels and prior > 0:
                self.crowd = crowd_or_right(self.posterior, annotations, self.weight, self.gold)
            prior = None if self.crowd is None else prior * self.crowd
        assert not isinstance(prior, float | int | str)
        self.prior = prior
        self.pseudo_counts = pseudo_counts_of(prior, smoothing, self.log_confusion)
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
        return log_proportions(self.counts, self.pseudo_counts)

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
        return proportions(totals, 0)


def run(em: EMState, max_iterations: int, tolerance: float, *, initialised: bool = False) -> DawidSkeneResult:
    """M-steps and E-steps until the objective rises by less than the tolerance; with an init, an E-step first."""
    likelihoods: list[float] = []

    def maximise() -> None:
        if likelihoods or not initialised:
            em.maximise()

    def expect() -> float:
        likelihood, penalty = em.expect()
        likelihoods.append(likelihood)
        return likelihood + penalty

    objectives, converged = iterate(maximise, expect, max_iterations, tolerance * em.total)
    confusion = em.log_confusion.exp().transpose(1, 2).contiguous()
    return DawidSkeneResult(em.posterior, confusion, em.class_prior, likelihoods, objectives, converged, em.prior)
