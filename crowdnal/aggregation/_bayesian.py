"""Bayesian classifier combination by variational inference: IBCC, and EBCC, its extension to correlated annotators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crowdnal._utils.options import check_integer, check_positive, typed
from crowdnal.aggregation._votes import vote_proportions
from crowdnal.aggregation.em import (
    AggregationResult,
    check_options,
    crowd_or_right,
    crowd_strength,
    log_proportions,
    say_collapse,
    weights_of,
)
from crowdnal.data import Annotations
from crowdnal.functional import em_step, label_counts


@dataclass
class BCCResult(AggregationResult):
    """What `ibcc` and `ebcc` found.

    Attributes:
        posterior: ``[N, C]``, rows sum to 1.
        confusion: ``[R, C, K]`` posterior mean, rows = true class, rows sum to 1.
        class_prior: ``[C]`` posterior mean.
        lower_bound: of the log-evidence of items with two labels or more, after every iteration; it never falls.
        converged: whether the last step was smaller than the tolerance.
    """

    posterior: Tensor
    confusion: Tensor
    class_prior: Tensor
    lower_bound: list[float]
    converged: bool


@typed
@torch.no_grad()
def ibcc(
    annotations: Annotations,
    *,
    diagonal: float = 4.0,
    off_diagonal: float = 1.0,
    class_strength: float = 1.0,
    max_iterations: int = 500,
    tolerance: float = 1e-6,
    dtype: torch.dtype = torch.float64,
) -> BCCResult:
    """Independent Bayesian classifier combination (Kim & Ghahramani 2012), variational (Simpson et al. 2013).

    Dawid-Skene with a Dirichlet prior on every row of every confusion and on the class prior, whose uncertainty is
    kept: an annotator with few labels says little. Starts from the vote proportions. Confusions and class prior are
    inferred from the items with two labels or more, as a single one agrees with itself; counted too, single labels
    make one class of everything, which the priors think likelier than the classes that labels name. What class an item
    with one label has is then read off its annotator's confusion, which counts beside the crowd's, whatever the class
    prior: without a second label, that would overrule who gave few.

    Args:
        annotations: the whole data set. A weight says how often its annotation counts.
        diagonal: of the Dirichlet prior of each confusion, above 0.
        off_diagonal: the same for every other cell.
        class_strength: of the Dirichlet prior of the classes, each, above 0.
        max_iterations: 1 or more.
        tolerance: stop when the lower bound rises by less than this per annotation; a negative one never stops.
        dtype: of the computation and the result, float64 or float32.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    model = _Subtypes(annotations, 1, 1.0, class_strength, diagonal, off_diagonal, dtype)
    found = model.run(model.votes, max_iterations, tolerance)
    say_collapse(found.posterior, annotations, "ibcc")
    return found


@typed
@torch.no_grad()
def ebcc(
    annotations: Annotations,
    *,
    subtypes: int = 10,
    subtype_strength: float = 0.1,
    diagonal: float = 4.0,
    off_diagonal: float = 1.0,
    class_strength: float = 1.0,
    restarts: int = 3,
    seed: int = 0,
    max_iterations: int = 500,
    tolerance: float = 1e-6,
    dtype: torch.dtype = torch.float64,
) -> BCCResult:
    """Enhanced Bayesian classifier combination (Li, Rubinstein & Cohn, ICML 2019), mean-field.

    Every class has ``subtypes`` kinds of items, of each of which every annotator has a confusion of their own: so
    annotators who go wrong on the same items are correlated. The memory is that of ``subtypes`` confusions each.
    Items with a single label inform no parameter, as in :func:`ibcc`.

    Args:
        annotations: the whole data set. A weight says how often its annotation counts.
        subtypes: M kinds of items for each class, 1 or more.
        subtype_strength: of the Dirichlet prior over them, in all.
        diagonal: as of :func:`ibcc`.
        off_diagonal: as of :func:`ibcc`.
        class_strength: as of :func:`ibcc`.
        restarts: random divisions of the votes among the subtypes; the one with the best lower bound counts.
        seed: of these.
        max_iterations: 1 or more.
        tolerance: stop when the lower bound rises by less than this per annotation; a negative one never stops.
        dtype: of the computation and the result, float64 or float32.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    check_integer(1, subtypes=subtypes, restarts=restarts)
    model = _Subtypes(annotations, subtypes, subtype_strength, class_strength, diagonal, off_diagonal, dtype)
    generator = torch.Generator().manual_seed(seed)
    found: BCCResult | None = None
    for _ in range(restarts if subtypes > 1 else 1):
        sizes = (len(annotations), model.classes, subtypes)
        share = -torch.rand(sizes, generator=generator, dtype=dtype).log().to(annotations.device)
        start = (model.votes.unsqueeze(2) * share / share.sum(2, keepdim=True)).flatten(1)
        one = model.run(start, max_iterations, tolerance)
        if found is None or one.lower_bound[-1] > found.lower_bound[-1]:
            found = one
    assert found is not None
    say_collapse(found.posterior, annotations, "ebcc")
    return found


class Labels:
    """Annotations, and those of them that parameters are inferred from.

    A single label of an item agrees with itself, whoever gave it; what weighs nothing is no label.
    """

    def __init__(self, annotations: Annotations, dtype: torch.dtype) -> None:
        if annotations.weight is not None:
            annotations = annotations.select(annotations.weight > 0)
        self.all, self.informing = annotations, annotations.select((annotations.counts > 1)[annotations.item])
        self.weight, _ = weights_of(annotations, dtype)
        self._informing_weight, self.total = weights_of(self.informing, dtype)
        self.votes = vote_proportions(annotations, annotations.num_classes).to(dtype)

    def count(self, posterior: Tensor) -> tuple[Tensor, Tensor]:
        """Counts ``[R, K, C]`` and sums ``[C]``; items without labels say nothing of the classes."""
        counts = label_counts(posterior, self.informing, weight=self._informing_weight)
        return counts, posterior[self.informing.counts > 0].sum(0)

    def expect(self, log_prior: Tensor, log_cells: Tensor) -> tuple[float, Tensor, Tensor]:
        """The E-step: negative log-likelihood, counts and sums."""
        loss, _, counts, sums = em_step(log_prior, log_cells, self._informing_weight, self.informing)
        return float(loss), counts, sums

    def posterior(self, log_prior: Tensor, log_cells: Tensor) -> Tensor:
        """``[N, C]`` of all items."""
        _, found, _, _ = em_step(log_prior, log_cells, self.weight, self.all)
        return found / found.sum(1, keepdim=True)  # the mean logarithms of a prior sum to less than 1

    def of_single_labels(self, posterior: Tensor) -> Tensor:
        """``[N, C]``, of items with one label from their annotator's confusion alone, shrunk to the crowd's."""
        a = self.all
        single = a.counts == 1
        if not bool(single.any()):
            return posterior
        crowd = crowd_or_right(self.votes, a, self.weight, None)
        counts, _ = self.count(posterior)
        n = a.indptr[:-1][single]
        confusion = log_proportions(counts, crowd_strength(counts, crowd) * crowd.t())
        posterior[single] = confusion[a.annotator[n], a.label[n]].softmax(1)
        return posterior


class _Subtypes:
    """Mean-field of classes with M subtypes each; the C M latent classes are one E-step of Dawid-Skene."""

    def __init__(
        self,
        annotations: Annotations,
        subtypes: int,
        subtype_strength: float,
        class_strength: float,
        diagonal: float,
        off_diagonal: float,
        dtype: torch.dtype,
    ) -> None:
        classes = annotations.num_classes
        check_options(annotations, classes, None, None, 0.0, dtype)
        check_positive(subtype_strength=subtype_strength, class_strength=class_strength)
        check_positive(diagonal=diagonal, off_diagonal=off_diagonal)
        self.labels = Labels(annotations, dtype)
        self.classes, self.subtypes = classes, subtypes
        like = self.votes = self.labels.votes
        prior = torch.full((classes, classes), off_diagonal).fill_diagonal_(diagonal)
        self.cell_prior = prior.to(like).t().repeat_interleave(subtypes, 1).unsqueeze(0)  # [1, K, C M]
        self.class_prior = like.new_full((classes,), class_strength)
        self.kind_prior = like.new_full((classes, subtypes), subtype_strength / subtypes)

    def run(self, start: Tensor, max_iterations: int, tolerance: float) -> BCCResult:
        check_integer(1, max_iterations=max_iterations)
        labels = self.labels
        counts, sums = labels.count(start)
        converged = False
        bounds: list[float] = []
        while len(bounds) < max_iterations and not converged:
            kinds = sums.view(self.classes, self.subtypes)
            of_class, of_kind = self.class_prior + kinds.sum(1), self.kind_prior + kinds
            cells = self.cell_prior + counts
            log_prior = mean_log(of_class, 0).unsqueeze(1) + mean_log(of_kind, 1)
            log_prior, log_cells = log_prior.view(1, -1), mean_log(cells, 1)
            loss, counts, sums = labels.expect(log_prior, log_cells)
            # the evidence of the E-step under the parameters' distributions, less their distance to the prior
            distance = divergence(of_class, self.class_prior, 0) + divergence(of_kind, self.kind_prior, 1)
            bounds.append(-loss - float(distance + divergence(cells, self.cell_prior, 1)))
            converged = len(bounds) > 1 and bounds[-1] - bounds[-2] < tolerance * labels.total
        share = (of_kind / of_kind.sum(1, keepdim=True)).view(1, 1, self.classes, self.subtypes)
        own = (cells / cells.sum(1, keepdim=True)).view(*cells.shape[:2], self.classes, self.subtypes)
        joint = labels.posterior(log_prior, log_cells)
        posterior = joint.view(len(joint), self.classes, self.subtypes).sum(2)
        return BCCResult(
            labels.of_single_labels(posterior),
            (own * share).sum(3).transpose(1, 2).contiguous(),
            of_class / of_class.sum(),
            bounds,
            converged,
        )


def mean_log(concentration: Tensor, dim: int) -> Tensor:
    """Of a Dirichlet distribution along ``dim``."""
    return concentration.digamma() - concentration.sum(dim, keepdim=True).digamma()


def divergence(posterior: Tensor, prior: Tensor, dim: int) -> Tensor:
    """Sum of the Kullback-Leibler divergences of Dirichlet distributions along ``dim`` from their priors."""
    normaliser = _log_beta(prior, dim) - _log_beta(posterior, dim)
    return ((posterior - prior) * mean_log(posterior, dim)).sum(dim).add(normaliser).sum()


def _log_beta(concentration: Tensor, dim: int) -> Tensor:
    return concentration.lgamma().sum(dim) - concentration.sum(dim).lgamma()
