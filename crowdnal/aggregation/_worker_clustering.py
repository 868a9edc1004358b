"""Dawid-Skene with clusters of annotators that share a confusion, for annotators who gave few labels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crowdnal._utils.options import typed
from crowdnal._utils.probability import proportions
from crowdnal.aggregation.clustering import farthest_first_clusters
from crowdnal.aggregation.em import (
    FLOOR,
    AggregationResult,
    check_options,
    crowd_or_right,
    iterate,
    possible,
    say_collapse,
    weights_of,
)
from crowdnal.data import Annotations, as_gold
from crowdnal.functional import em_step

MOST = 3
"""Clusters that are tried where their number is not given."""


@dataclass
class WorkerClusteringResult(AggregationResult):
    """What `worker_clustering` found.

    Attributes:
        posterior: ``[N, C]``, rows sum to 1.
        membership: ``[R, M]`` probability of each annotator to be of each cluster.
        clusters: ``[M, C, K]`` confusions, row = true class, rows sum to 1.
        class_prior: ``[C]``.
        objective: the lower bound on the log-likelihood (plus the pseudo-counts' log-density), after every iteration.
        converged: whether the last step was smaller than the tolerance.
    """

    posterior: Tensor
    membership: Tensor
    clusters: Tensor
    class_prior: Tensor
    objective: list[float]
    converged: bool

    @property
    def confusion(self) -> Tensor:
        """``[R, C, K]``: the clusters', weighed by membership."""
        return torch.einsum("rm,mck->rck", self.membership, self.clusters)


@typed
@torch.no_grad()
def worker_clustering(
    annotations: Annotations,
    num_clusters: int | None = None,
    *,
    max_iterations: int = 100,
    tolerance: float = 1e-5,
    smoothing: float = 0.01,
    gold: Any = None,
    dtype: torch.dtype = torch.float64,
) -> WorkerClusteringResult:
    """Variational EM for the worker clustering model (Imamura, Sato & Sugiyama 2018).

    An annotator belongs to one of M clusters, and labels with its confusion. That is the paper's model; the inference
    here is ours. The posterior is taken as a product over items and annotators, ``q(z_i) q(m_r)``: ``log q(z_i = k) =
    log π_k + Σ_n Σ_m q(m_r = m) log A_m[k, y_n]`` is the E-step of Dawid-Skene with averaged log confusions, and
    ``log q(m_r = m) = log τ_m + Σ_y Σ_k c_r[y, k] log A_m[k, y]``, c the expected counts; π, τ and A are in closed
    form. The bound never falls.

    Starts from the vote proportions and K-means of the confusions counted against them: the first centre is the
    annotator with most labels, each further one the farthest by (labels x squared distance); nothing is drawn.

    Args:
        annotations: the whole data set. A weight says how often its annotation counts.
        num_clusters: M, 1 to R; None: the one of 1 to 3 (``MOST``) with the best Bayesian information criterion, so
            that a cluster more has to explain the labels better than its parameters alone would.
        max_iterations: 1 or more.
        tolerance: stop when the objective rises by less than this per annotation; a negative one never stops.
        smoothing: pseudo-count added to every cell of every cluster's confusion, in the mean: they are in the
            proportions of the crowd's confusion, as counted against the votes.
        gold: known true classes, as :func:`crowdnal.data.as_gold` takes them. They hold throughout.
        dtype: of the computation and the result, float64 or float32.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    gold = None if gold is None else as_gold(gold, annotations, annotations.num_classes)
    check_options(annotations, annotations.num_classes, gold, None, smoothing, dtype)
    most = max(annotations.num_annotators, 1)
    if num_clusters is not None and not 1 <= num_clusters <= most:
        raise ValueError(f"num_clusters={num_clusters} must be 1 to R={annotations.num_annotators} annotators")
    gold = None if gold is None else gold.to(annotations.device)
    sizes = range(1, min(MOST, most) + 1) if num_clusters is None else (num_clusters,)
    found: list[WorkerClusteringResult] = []
    for size in sizes:
        model = _Model(annotations, size, smoothing, gold, dtype)
        objective, converged = iterate(model.maximise, model.expect, max_iterations, tolerance * model.total)
        clusters = model.log_clusters.exp().transpose(1, 2).contiguous()
        found.append(
            WorkerClusteringResult(
                model.posterior, model.membership, clusters, model.class_prior, objective, converged
            )
        )  # fmt: skip
    cells, labels = annotations.num_classes * (annotations.num_classes - 1), max(model.total, 1.0)
    best = max(found, key=lambda one: one.objective[-1] - len(one.clusters) * (cells + 1) * math.log(labels) / 2)
    say_collapse(best.posterior, annotations, "worker_clustering")
    return best


class _Model:
    """`posterior` [N, C], its `counts` [R, K, C]; `membership` [R, M], `log_clusters` [M, K, C]."""

    def __init__(
        self, annotations: Annotations, num_clusters: int, smoothing: float, gold: Tensor | None, dtype: torch.dtype
    ) -> None:
        a = self.annotations = annotations
        self.gold = gold
        self.weight, self.total = weights_of(a, dtype)
        flat = torch.zeros(a.num_annotators, a.num_classes, a.num_classes, dtype=dtype, device=a.device)
        self._step(None, flat)
        if gold is not None:
            only = possible(gold, a.num_classes).to(dtype)
            self._step(torch.where((gold >= 0).unsqueeze(1), only, self.posterior).log(), flat)
        self.membership = farthest_first_clusters(self.counts, num_clusters)
        self.pseudo_counts = smoothing * a.num_classes * crowd_or_right(self.posterior, a, self.weight, gold).t()

    def maximise(self) -> None:
        """M-step: class prior, weights and confusions of the clusters."""
        self.class_prior = proportions(self.totals, 0).clamp(min=FLOOR)
        self.cluster_weights = self.membership.mean(0).clamp(min=FLOOR)
        counts = (self.membership.T @ self.counts.flatten(1)).view(-1, *self.counts.shape[1:]) + self.pseudo_counts
        counts = counts.clamp(min=FLOOR)
        self.log_clusters = (counts / counts.sum(1, keepdim=True)).log()

    def expect(self) -> float:
        """E-steps: memberships, then the posterior; returns the objective."""
        scores = self.cluster_weights.log() + self.counts.flatten(1) @ self.log_clusters.flatten(1).T
        self.membership = scores.softmax(1)
        log_prior = self.class_prior.log().unsqueeze(0)
        if self.gold is not None:
            log_prior = torch.where(possible(self.gold, log_prior.shape[1]), log_prior, -math.inf)
        mixed = (self.membership @ self.log_clusters.flatten(1)).view(self.counts.shape)
        likelihood = -self._step(log_prior, mixed)
        entropy = (self.membership * (self.cluster_weights.log() - self.membership.clamp(min=1e-300).log())).sum()
        return likelihood + float(entropy + (self.pseudo_counts * self.log_clusters).sum())

    def _step(self, log_prior: Tensor | None, log_confusion: Tensor) -> float:
        loss, self.posterior, self.counts, self.totals = em_step(
            log_prior, log_confusion, self.weight, self.annotations
        )
        return float(loss)
