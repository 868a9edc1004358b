"""Bayesian classifier combination where annotators form communities that label alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from crowdnal._utils.options import check_integer, check_positive, typed
from crowdnal._utils.probability import proportions
from crowdnal.aggregation._bayesian import BCCResult, Labels, divergence, mean_log
from crowdnal.aggregation.clustering import farthest_first_clusters
from crowdnal.aggregation.em import STRENGTHS, check_options, crowd_or_right, say_collapse
from crowdnal.data import Annotations


@dataclass
class CBCCResult(BCCResult):
    """What `cbcc` found.

    Attributes:
        membership: ``[R, M]`` probability of each annotator to be of each community.
        communities: ``[M, C, K]`` confusions, row = true class, rows sum to 1.
        strength: labels of each class that a community's confusion counts for in those of its annotators.
    """

    membership: Tensor
    communities: Tensor
    strength: float


@typed
@torch.no_grad()
def cbcc(
    annotations: Annotations,
    num_communities: int = 3,
    *,
    strength: float | None = None,
    prior_labels: float = 200.0,
    class_strength: float = 1.0,
    max_iterations: int = 500,
    tolerance: float = 1e-6,
    dtype: torch.dtype = torch.float64,
) -> CBCCResult:
    """Community-based Bayesian classifier combination (Venanzi et al. 2014), variational.

    Every annotator is of one of M communities, and their confusion lies around its. The paper draws its logits from a
    normal distribution around the community's; here each row has a Dirichlet distribution ``Dir(s A_m[c])``, so that
    nothing but the memberships is approximated: ``q(z) Π_r q(m_r) q(π_r | m_r)`` with ``q(π_r | m) = Dir(s A_m +
    counts_r)`` and ``q(m_r)`` from the evidence of the counts. A has a Dirichlet prior around the crowd's confusion,
    counted against the votes, and is of greatest posterior probability by Minka's fixed point (2000); the bound never
    falls. Items with a single label inform no parameter, as in :func:`crowdnal.ibcc`.

    Starts from the vote proportions and K-means of the confusions counted against them; nothing is drawn.

    Args:
        annotations: the whole data set. A weight says how often its annotation counts.
        num_communities: M, 1 or more, at most one for each annotator is made. With 1 all lie around the crowd's.
        strength: s, above 0; None: the one of 1 to 20 labels with the best bound, after every iteration.
        prior_labels: of each class that the crowd's confusion counts for in each community's, above 0.
        class_strength: of the Dirichlet prior of the classes, each, above 0.
        max_iterations: 1 or more.
        tolerance: stop when the lower bound rises by less than this per annotation; a negative one never stops.
        dtype: of the computation and the result, float64 or float32.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    check_options(annotations, annotations.num_classes, None, None, 0.0, dtype)
    check_integer(1, num_communities=num_communities, max_iterations=max_iterations)
    check_positive(class_strength=class_strength, prior_labels=prior_labels)
    if strength is not None:
        check_positive(strength=strength)
    labels, classes = Labels(annotations, dtype), annotations.num_classes
    pseudo = prior_labels * crowd_or_right(labels.votes, labels.all, labels.weight, None).t()
    counts, sums = labels.count(labels.votes)
    model = _Communities(
        farthest_first_clusters(counts, min(num_communities, max(len(counts), 1))), counts, pseudo, strength
    )
    class_prior = sums.new_full((classes,), class_strength)
    bounds: list[float] = []
    converged = False
    while len(bounds) < max_iterations and not converged:
        of_class = class_prior + sums
        model.maximise(counts)
        log_prior, log_cells = mean_log(of_class, 0).unsqueeze(0), model.mean_log()
        loss, counts, sums = labels.expect(log_prior, log_cells)
        bounds.append(-loss - float(divergence(of_class, class_prior, 0)) - model.distance())
        converged = len(bounds) > 1 and bounds[-1] - bounds[-2] < tolerance * labels.total
    posterior = labels.of_single_labels(labels.posterior(log_prior, log_cells))
    say_collapse(posterior, annotations, "cbcc")
    return CBCCResult(
        posterior,
        model.mean().transpose(1, 2).contiguous(),
        of_class / of_class.sum(),
        bounds,
        converged,
        model.membership,
        model.means.transpose(1, 2).contiguous(),
        model.strength,
    )


class _Communities:
    """`membership` [R, M], `means` [M, K, C] of the confusions, whose rows are distributions over K; `strength`."""

    def __init__(self, membership: Tensor, counts: Tensor, pseudo: Tensor, strength: float | None) -> None:
        self.membership, self.pseudo = membership, pseudo
        self.strengths = STRENGTHS if strength is None else (strength,)
        self.strength = self.strengths[len(self.strengths) // 2]
        self.means = proportions((membership.T @ counts.flatten(1)).view(-1, *pseudo.shape) + pseudo, 1)

    def maximise(self, counts: Tensor) -> None:
        """Strength, means and memberships from expected counts [R, K, C], each given the others."""
        self.counts, weight = counts, self.membership.T
        self.strength = max(self.strengths, key=lambda s: float((weight.T * self._evidence(s)).sum()))
        for m in range(len(self.means)):
            prior = self.strength * self.means[m]
            seen = prior * torch.einsum("r,rkc->kc", weight[m], (prior + counts).digamma() - prior.digamma())
            self.means[m] = proportions(seen + self.pseudo, 0, floor=1e-10)
        self.of_share = 1 + self.membership.sum(0)
        self.membership = (mean_log(self.of_share, 0) + self._evidence(self.strength)).softmax(1)

    def _evidence(self, strength: float) -> Tensor:
        """[R, M] log-probability of each annotator's counts in each community."""
        found = []
        for mean in self.means:
            prior = strength * mean
            cells = ((prior + self.counts).lgamma() - prior.lgamma()).sum((1, 2))
            rows = prior.sum(0).lgamma() - (prior.sum(0) + self.counts.sum(1)).lgamma()
            found.append(cells + rows.sum(1))
        return torch.stack(found, 1)

    def distance(self) -> float:
        """Divergence of shares, memberships and confusions from their priors, less the means' log-density."""
        q = self.membership
        memberships = (q * (q.clamp(min=1e-300).log() - mean_log(self.of_share, 0))).sum()
        confusions = (self.counts * self.mean_log()).sum() - (q * self._evidence(self.strength)).sum()
        shares = divergence(self.of_share, torch.ones_like(self.of_share), 0)
        return float(memberships + confusions + shares - (self.pseudo * self.means.log()).sum())

    def mean_log(self) -> Tensor:
        """[R, K, C] mean logarithms of the confusions."""
        return self._average(lambda cells: mean_log(cells, 1))

    def mean(self) -> Tensor:
        """[R, K, C] mean confusions."""
        return self._average(lambda cells: proportions(cells, 1))

    def _average(self, of: Callable[[Tensor], Tensor]) -> Tensor:
        total = torch.zeros_like(self.counts)
        for weight, mean in zip(self.membership.T, self.means, strict=True):
            total += weight.view(-1, 1, 1) * of(self.strength * mean + self.counts)
        return total
