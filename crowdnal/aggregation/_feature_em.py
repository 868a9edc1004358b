"""True labels from features and annotations: EM whose prior of an item is made without that item's own labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crowdnal._utils.folds import deal
from crowdnal._utils.options import check_integer, typed
from crowdnal._utils.probability import proportions
from crowdnal.aggregation._votes import vote_proportions
from crowdnal.aggregation.em import (
    STRENGTHS,
    AggregationResult,
    Prior,
    check_features,
    check_options,
    crowd_confusion,
    crowd_strength,
    log_proportions,
    pooled_confusion,
    possible,
    pseudo_counts_of,
    standard_errors,
    weights_of,
)
from crowdnal.data import Annotations, as_gold
from crowdnal.functional import em_step, label_counts, segment_sum
from crowdnal.functional.segments import scatter_rows

SHRINKAGES = (0.3, 0.6, 0.9, 0.97)
EXPONENTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
_COMPARED = (0, 1, 3)
"""Rounds in which the shrinkages are compared; the others keep the last one chosen."""
_MARGIN = 3.0
"""Standard errors by which features must foresee labels better than none: the best of 44 is better by chance, too."""


@dataclass
class FeatureEMResult(AggregationResult):
    """What `feature_em` found.

    Attributes:
        posterior: ``[N, C]``, rows sum to 1; that of an item without labels is its prior.
        log_prior: ``[N, C]`` what the features of an item say of its class, from other items alone.
        confusion: ``[R, C, K]``, rows = true class, rows sum to 1.
        shrinkage: chosen, of the covariance of the features to the identity.
        exponent: chosen, of the prior: 0 where the features say nothing of the labels.
        log_likelihood: mean log-probability of each label given its item's features and other labels, every round.
        pseudo_counts: ``[C, K]`` or ``[R, C, K]``, the prior of the confusions; None: none.
    """

    posterior: Tensor
    log_prior: Tensor
    confusion: Tensor
    shrinkage: float
    exponent: float
    log_likelihood: list[float]
    pseudo_counts: Tensor | None


@typed
@torch.no_grad()
def feature_em(
    features: Tensor,
    annotations: Annotations,
    *,
    confusion_prior: Prior = "crowd",
    gold: Any = None,
    folds: int = 5,
    rounds: int = 8,
    shrinkages: Sequence[float] = SHRINKAGES,
    exponents: Sequence[float] = EXPONENTS,
    seed: int = 0,
) -> FeatureEMResult:
    """Dawid-Skene with a classifier as the prior, which has never seen the labels of the item that it is asked about.

    A classifier that is trained on an item's labels repeats them: as a prior in EM (Raykar et al. 2010) it counts
    them twice, and what it got wrong stays wrong. Here the items are dealt into folds and each fold's prior is made
    from the others (cross-fitting, as of Chernozhukov et al. 2018): a linear discriminant of the standardised
    features with the posteriors as fractional classes and a shrunk covariance (Friedman 1989), raised to an
    exponent that makes up for its overconfidence. Shrinkage and exponent are those under which each label is most
    probable given the features and the other labels of its item; where the features are worth nothing, the exponent
    is 0 and the result that of :func:`crowdnal.dawid_skene`. The crowd's confusion is learnt anew in every round, each
    label counted against what features and other labels say, unless classes would change places. Where no item has two
    labels (and no class is known) nothing tells how often labels are right: they are kept, and features decide for the
    other items alone. Starts from the vote proportions. Needs no gradient: seconds for thousands of items.

    Args:
        features: ``[N, D]`` of all items, such as a backbone's pre-logits. D matters: memory is ``folds · D²``.
        annotations: of the same N items. A weight says how often its annotation counts.
        confusion_prior: as of :func:`crowdnal.dawid_skene`.
        gold: known true classes, as :func:`crowdnal.data.as_gold` takes them. They hold throughout.
        folds: 2 or more; never more than there are items.
        rounds: of priors, M-step and E-step, 1 or more.
        shrinkages: to choose from, above 0 and at most 1.
        exponents: to choose from, 0 or more.
        seed: of the folds.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    classes = annotations.num_classes
    check_features(features, annotations)
    check_integer(2, folds=folds)
    check_integer(1, rounds=rounds)
    if not shrinkages or not all(0 < s <= 1 for s in shrinkages):
        raise ValueError(f"shrinkages={tuple(shrinkages)} must be above 0 and at most 1, one at least")
    if not exponents or not all(0 <= e < float("inf") for e in exponents):
        raise ValueError(f"exponents={tuple(exponents)} must be 0 or more and finite, one at least")
    known = None if gold is None else as_gold(gold, annotations, classes).to(annotations.device)
    check_options(annotations, classes, known, confusion_prior, 0.0, torch.float64)
    dealt = min(folds, max(2, len(features)))

    def found(learns: bool) -> FeatureEMResult | None:
        em = _FeatureEM(features, annotations, known, confusion_prior, dealt, seed)
        return _iterate(em, rounds if em.crowd is not None else 1, shrinkages, exponents, learns)

    uses_crowd = confusion_prior is not None and not isinstance(confusion_prior, Tensor)
    result = found(uses_crowd) or found(False)
    assert result is not None
    return result


def _iterate(
    em: _FeatureEM, rounds: int, shrinkages: Sequence[float], exponents: Sequence[float], learns: bool
) -> FeatureEMResult | None:
    """Rounds of EM; None where the crowd's confusion, if it ``learns``, takes one class for another."""
    likelihoods: list[float] = []
    shrinkage = shrinkages[0]
    for number in range(rounds):
        table = em.log_confusion()
        compared = shrinkages if number in _COMPARED else (shrinkage,)
        ratios = {s: em.discriminant(s) for s in compared}
        tried = [(*em.score(ratios[s], table, e), s, e) for s in compared for e in exponents]
        each, log_prior, shrinkage, exponent = max(tried, key=lambda one: float(one[0].sum()))
        if number == 0:  # the votes have not seen the features: an honest test of these
            without = em.score(ratios[shrinkage], table, 0.0)
            if standard_errors(each - without[0]) <= _MARGIN:
                (each, log_prior), exponent, exponents = without, 0.0, (0.0,)
        likelihoods.append(float(each.mean()) if len(each) else 0.0)
        if learns and exponent > 0 and not em.learn_crowd(log_prior, table):
            return None
        if em.expect(log_prior, table) < 1e-4:
            break
    confusion = em.log_confusion().exp().transpose(1, 2).contiguous()
    prior = em.pseudo_counts()
    return FeatureEMResult(em.posterior, log_prior, confusion, shrinkage, exponent, likelihoods, prior)


def _solve(positive: Tensor, right: Tensor) -> Tensor:
    """``positive^-1 right``, by half the work of any matrix's; where rounding left it indefinite, by all of it."""
    factor, failed = torch.linalg.cholesky_ex(positive)
    return torch.linalg.solve(positive, right) if failed else torch.cholesky_solve(right, factor)


class _FeatureEM:
    """`posterior` [N, C] float64 and `counts` [R, K, C]."""

    def __init__(
        self,
        features: Tensor,
        annotations: Annotations,
        gold: Tensor | None,
        prior: Prior,
        folds: int,
        seed: int,
    ) -> None:
        self.annotations, self.classes = annotations, annotations.num_classes
        self.weight, _ = weights_of(annotations, torch.float64)
        self.posterior = vote_proportions(annotations, self.classes)
        self.possible = None if gold is None else possible(gold, self.classes)
        if gold is not None and self.possible is not None:
            self.posterior = torch.where((gold >= 0).unsqueeze(1), self.possible.double(), self.posterior)
        self.informed = annotations.counts > 0 if gold is None else (annotations.counts > 0) | (gold >= 0)
        self.counts = label_counts(self.posterior, annotations, weight=self.weight)
        self.prior, self.moved = prior, False
        # standardised, so that no feature rules by its unit; those that never vary say nothing
        x = features.to(annotations.device, torch.promote_types(features.dtype, torch.float32))
        spread = x.std(0, correction=0)
        varies = spread > 1e-6 * x.abs().amax(0) if len(x) else spread > 0
        self.x = ((x - x.mean(0)) / spread)[:, varies]
        self.fold = deal(len(x), folds, seed).to(x.device)
        self.squares = [self.x[rows].t() @ self.x[rows] for rows in map(self._others, range(folds))]
        several = annotations.counts > 1 if gold is None else (annotations.counts > 1) | (gold >= 0)
        self.crowd = crowd_confusion(self.posterior, annotations, self.weight, several)

    def _others(self, fold: int) -> Tensor:
        """Rows that the prior of a fold is made from."""
        return ((self.fold != fold) & self.informed).nonzero()[:, 0]

    def pseudo_counts(self) -> Tensor | None:
        """Of the confusions; the first M-step knows the votes alone and takes the strongest."""
        if self.prior is None or isinstance(self.prior, Tensor):
            return self.prior
        if self.crowd is None:
            return None
        if not isinstance(self.prior, str):
            return self.prior * self.crowd
        return (crowd_strength(self.counts, self.crowd) if self.moved else STRENGTHS[-1]) * self.crowd

    def log_confusion(self) -> Tensor:
        """The M-step, ``[R, K, C]``."""
        return log_proportions(self.counts, pseudo_counts_of(self.pseudo_counts(), 0.0, self.counts))

    def class_prior(self) -> Tensor:
        """``[C]`` the mean posterior, of one item of each class more."""
        return proportions(self.posterior[self.informed].sum(0) + 1, 0)

    def discriminant(self, shrinkage: float) -> Tensor:
        """``[N, C]`` log-likelihood ratios of the classes, each fold's from the others."""
        found = self.posterior.new_zeros(len(self.x), self.classes)
        for k, square in enumerate(self.squares):
            rows, held = self._others(k), (self.fold == k).nonzero()[:, 0]
            if len(rows) == 0 or len(held) == 0:
                continue
            share = self.posterior[rows].to(self.x.dtype)
            size = share.sum(0) + 1e-3
            means = share.t() @ self.x[rows] / size.unsqueeze(1)
            within = torch.addmm(square, size * means.t(), means, alpha=-1).mul_((1 - shrinkage) / size.sum())
            level = (square.diagonal() - size @ means.square()).mean() / size.sum()
            within.diagonal().add_(shrinkage * level.clamp(min=1e-6))
            weights = _solve(within, means.t())
            found[held] = (self.x[held] @ weights - (means * weights.t()).sum(1) / 2).double()
        return found

    def score(self, ratios: Tensor, table: Tensor, exponent: float) -> tuple[Tensor, Tensor]:
        """Log-probability ``[nnz]`` of each label given its item's prior and other labels; that prior ``[N, C]``."""
        a = self.annotations
        log_prior = (exponent * ratios + self.class_prior().log()).log_softmax(1)
        if self.crowd is None:
            foreseen = log_prior[a.item, a.label] if a.num_annotations else log_prior.new_zeros(0)
            return foreseen, self.posterior.log().where(self.informed.unsqueeze(1), log_prior)
        if self.possible is not None:
            log_prior = log_prior.where(self.possible, -torch.inf).log_softmax(1)
        if a.num_annotations == 0:
            return log_prior.new_zeros(0), log_prior
        given = table[a.annotator, a.label]
        return (self.without(log_prior, given) + given).logsumexp(1), log_prior

    def without(self, log_prior: Tensor, given: Tensor) -> Tensor:
        """``[nnz, C]`` log-posterior of each label's item by its features and its other labels."""
        a = self.annotations
        counted = given if self.weight is None else given * self.weight.unsqueeze(1)
        return ((log_prior + segment_sum(counted, a))[a.item] - counted).log_softmax(1)

    def learn_crowd(self, log_prior: Tensor, table: Tensor) -> bool:
        """The crowd's confusion anew: each label counts against its item's features and other labels, not itself.

        So the features correct what everybody confuses, which votes hide. Returns whether every class is still called
        by the name that the votes give it: where everybody is as often wrong as right, classes can change places.
        """
        a = self.annotations
        if self.crowd is None or a.num_annotations == 0:
            return True
        rows = self.without(log_prior, table[a.annotator, a.label]).exp()
        rows = rows if self.weight is None else rows * self.weight.unsqueeze(1)
        learnt = pooled_confusion(scatter_rows(rows, a.label, a.label.argsort(stable=True), a.num_classes))
        before, self.crowd = self.crowd, learnt
        return torch.equal(learnt.argmax(1), before.argmax(1))

    def expect(self, log_prior: Tensor, table: Tensor) -> float:
        """E-step; returns by how much a probability moved at most."""
        before, self.moved = self.posterior, True
        _, self.posterior, self.counts, _ = em_step(log_prior, table, self.weight, self.annotations)
        return float((self.posterior - before).abs().max()) if len(before) else 0.0
