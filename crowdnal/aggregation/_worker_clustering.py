"""Dawid-Skene with clusters of annotators that share a confusion, for annotators who gave few labels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from crowdnal.aggregation._em import FLOOR, check_options, possible
from crowdnal.data import Annotations
from crowdnal.functional import em_step
from crowdnal.functional.segments import annotation_weight

__all__ = ["WorkerClusteringResult", "worker_clustering"]


@dataclass
class WorkerClusteringResult:
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
    def labels(self) -> Tensor:
        """``[N]`` most probable class; the lowest of equally probable ones."""
        return self.posterior.argmax(1)

    @property
    def confusion(self) -> Tensor:
        """``[R, C, K]``: the clusters', weighed by membership."""
        return torch.einsum("rm,mck->rck", self.membership, self.clusters)


@torch.no_grad()
def worker_clustering(
    annotations: Annotations,
    num_clusters: int = 3,
    *,
    max_iterations: int = 100,
    tolerance: float = 1e-5,
    smoothing: float = 0.01,
    gold: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> WorkerClusteringResult:
    """Variational EM for the worker clustering model (Imamura, Sato & Sugiyama 2018).

    An annotator belongs to one of M clusters, and labels with its confusion. That is the paper's model; the inference
    here is ours. The posterior is taken as a product over items and annotators, ``q(z_i) q(m_r)``: ``log q(z_i = k) =
    log π_k + Σ_n Σ_m q(m_r = m) log A_m[k, y_n]`` is the E-step of Dawid-Skene with averaged log confusions, and
    ``log q(m_r = m) = log τ_m + Σ_y Σ_k c_r[y, k] log A_m[k, y]``, c the expected counts; π, τ and A are in closed
    form. The bound never falls.

    Starts from the shares of the votes and K-means of the confusions counted against them: the first centre is the
    annotator with most labels, each further one the farthest by (labels x squared distance); nothing is drawn.

    Args:
        annotations: the whole data set. A weight says how often its annotation counts.
        num_clusters: M, 1 to R.
        max_iterations: 1 or more.
        tolerance: stop when the objective rises by less than this per annotation; a negative one never stops.
        smoothing: pseudo-count added to every cell of every cluster's confusion.
        gold: ``[N]`` integers, known true classes, -1 where unknown. They hold throughout.
        dtype: of the computation and the result, float64 or float32.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    check_options(annotations, annotations.num_classes, gold, None, smoothing, dtype)
    if not 1 <= num_clusters <= max(annotations.num_annotators, 1):
        raise ValueError(f"num_clusters={num_clusters} must be 1 to R={annotations.num_annotators} annotators")
    if max_iterations < 1:
        raise ValueError(f"max_iterations must be 1 or more, got {max_iterations}")
    if math.isnan(tolerance):
        raise ValueError("tolerance must be a number, got NaN; a negative one never stops")
    model = _Model(annotations, num_clusters, smoothing, None if gold is None else gold.to(annotations.device), dtype)
    objective: list[float] = []
    converged = False
    while len(objective) < max_iterations and not converged:
        model.maximise()
        objective.append(model.expect())
        converged = len(objective) > 1 and objective[-1] - objective[-2] < tolerance * model.total
    clusters = model.log_clusters.exp().transpose(1, 2).contiguous()
    return WorkerClusteringResult(model.posterior, model.membership, clusters, model.class_prior, objective, converged)


class _Model:
    """`posterior` [N, C], its `counts` [R, K, C]; `membership` [R, M], `log_clusters` [M, K, C]."""

    def __init__(
        self,
        annotations: Annotations,
        num_clusters: int,
        smoothing: float,
        gold: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        a = self.annotations = annotations
        self.smoothing, self.gold = smoothing, gold
        self.weight = annotation_weight(a, None, dtype)
        self.total = float(a.num_annotations if self.weight is None else self.weight.sum()) or 1.0
        flat = torch.zeros(a.num_annotators, a.num_classes, a.num_classes, dtype=dtype, device=a.device)
        self._step(None, flat)
        if gold is not None:
            only = possible(gold, a.num_classes).to(dtype)
            self._step(torch.where((gold >= 0).unsqueeze(1), only, self.posterior).log(), flat)
        self.membership = _k_means(self.counts, num_clusters)

    def maximise(self) -> None:
        """M-step: class prior, shares of the clusters and their confusions."""
        classes = self.counts.shape[2]
        total = self.totals.sum()
        self.class_prior = torch.where(total > 0, self.totals / total.clamp(min=FLOOR), 1 / max(classes, 1))
        self.class_prior = self.class_prior.clamp(min=FLOOR)
        self.shares = self.membership.mean(0).clamp(min=FLOOR)
        counts = (self.membership.T @ self.counts.flatten(1)).view(-1, *self.counts.shape[1:]) + self.smoothing
        counts = counts.clamp(min=FLOOR)
        self.log_clusters = (counts / counts.sum(1, keepdim=True)).log()

    def expect(self) -> float:
        """E-steps: memberships, then the posterior; returns the objective."""
        scores = self.shares.log() + self.counts.flatten(1) @ self.log_clusters.flatten(1).T
        self.membership = scores.softmax(1)
        log_prior = self.class_prior.log().unsqueeze(0)
        if self.gold is not None:
            log_prior = torch.where(possible(self.gold, log_prior.shape[1]), log_prior, -math.inf)
        mixed = (self.membership @ self.log_clusters.flatten(1)).view(self.counts.shape)
        likelihood = -self._step(log_prior, mixed)
        entropy = (self.membership * (self.shares.log() - self.membership.clamp(min=1e-300).log())).sum()
        return likelihood + float(entropy + self.smoothing * self.log_clusters.sum())

    def _step(self, log_prior: Tensor | None, log_confusion: Tensor) -> float:
        loss, self.posterior, self.counts, self.totals = em_step(
            log_prior, log_confusion, self.weight, self.annotations
        )
        return float(loss)


def _k_means(counts: Tensor, num_clusters: int, iterations: int = 20) -> Tensor:
    """``[R, M]`` one-hot clusters of annotators by their confusions, those with more labels counting for more."""
    labels = counts.sum((1, 2))
    shares = counts + 1
    points = (shares / shares.sum(1, keepdim=True)).flatten(1)
    eye = torch.eye(num_clusters, dtype=counts.dtype, device=counts.device)
    if len(points) == 0:
        return eye[:0]
    chosen = labels.argmax().view(1)
    while len(chosen) < num_clusters:
        nearest = torch.cdist(points, points[chosen]).square().min(1).values * (labels + FLOOR)
        nearest[chosen] = -1.0
        chosen = torch.cat([chosen, nearest.argmax().view(1)])
    centres = points[chosen]
    for _ in range(iterations):
        member = eye[torch.cdist(points, centres).argmin(1)]
        weight = (member * labels.unsqueeze(1)).T
        size = weight.sum(1, keepdim=True)
        centres = torch.where(size > 0, weight @ points / size.clamp(min=FLOOR), centres)
    return member
