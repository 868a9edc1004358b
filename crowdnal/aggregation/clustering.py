"""K-means of annotators and of annotations, for the methods that begin with groups of what is alike.

Three algorithms stay: few matrices afford every iteration on all of them (:func:`cluster_matrices`), the 100,000 cells
of CMM need mini-batches (:func:`fit_clusters`), and worker clustering counts annotators by their labels, draws nothing
and does without scikit-learn (:func:`farthest_first_clusters`). Results differ in more than rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from crowdnal._utils.extras import require
from crowdnal.aggregation.em import FLOOR

_BATCH = 1024


def confusion_points(counts: Tensor) -> Tensor:
    """Confusions of counts ``[R, K, C]``, one label added to every cell: who gave few is near everyone's middle."""
    counts = counts + 1
    return counts / counts.sum(1, keepdim=True)


def cluster_matrices(weight: Tensor, num_groups: int, seed: int) -> Tensor:
    """K-means of the flattened matrices, with as many clusters as there are different matrices, at most ``num_groups``.

    Annotators without labels all keep the identity, so that there may be fewer different matrices than groups.

    Args:
        weight: ``[R, C, K]``.
        num_groups: G, 1 or more.
        seed: of k-means++.

    Returns:
        ``[R]`` group of each annotator, numbered from 0 by first appearance, on the device of ``weight``.

    Raises:
        ImportError: scikit-learn is missing; the message names the extra.
        ValueError: a matrix is not finite.
    """
    rows = weight.detach().flatten(1).double().cpu()
    bad = ~rows.isfinite().all(1)
    if bool(bad.any()):
        raise ValueError(
            f"the confusion of annotator {int(bad.nonzero()[0])} is not finite: training diverged, lower the learning "
            "rate"
        )
    distinct, found = rows.unique(dim=0, return_inverse=True)
    if len(distinct) > num_groups:
        means = require("sklearn.cluster", extra="train").KMeans(num_groups, n_init=1, random_state=seed)
        found = torch.from_numpy(means.fit_predict(rows.numpy())).long()
    names, dense = found.unique(return_inverse=True)
    first = torch.full_like(names, len(found)).scatter_reduce(0, dense, torch.arange(len(found)), "amin")
    return first.argsort().argsort()[dense].to(weight.device)


def fit_clusters(
    points: np.ndarray, num_groups: int, seed: int, *, components: int | None = None, times: np.ndarray | None = None
) -> Callable[[np.ndarray], np.ndarray]:
    """K-means on points ``[L, D]``, L > 0, standardised; as many groups as there are different points at most.

    Args:
        points: ``[L, D]``.
        num_groups: 1 or more.
        seed: of K-means.
        components: work on so many principal components.
        times: ``[L]`` how often each point counts.

    Returns:
        What gives points ``[n, D]`` their groups ``[n]``.
    """
    decomposition = require("sklearn.decomposition", extra="train")
    clusters = require("sklearn.cluster", extra="train")
    if (points == points[0]).all():
        return lambda new: np.zeros(len(new), dtype=np.int64)
    project = None
    if components is not None:
        kept = min(components, *points.shape)
        project = decomposition.PCA(n_components=kept, random_state=seed).fit(points).transform
        points = project(points)
    mean, spread = points.mean(0), points.std(0)
    spread = np.where(spread > 1e-12, spread, 1.0)
    points = (points - mean) / spread
    different = len(np.unique(points.round(9), axis=0))
    means = clusters.MiniBatchKMeans(
        min(num_groups, different), random_state=seed, batch_size=_BATCH, n_init=3, reassignment_ratio=0.0
    ).fit(points, sample_weight=times)

    def assign(new: np.ndarray) -> np.ndarray:
        new = new if project is None else project(new)
        return np.asarray(means.predict((new - mean) / spread), dtype=np.int64)

    return assign


def largest_first(groups: Tensor, weight: Tensor | None, num_groups: int) -> Tensor:
    """The groups ``[L]`` renumbered by their total weight, so that equal inits are numbered alike."""
    size = torch.bincount(groups.cpu(), None if weight is None else weight.cpu(), minlength=num_groups)
    return torch.argsort(torch.argsort(-size, stable=True), stable=True).to(groups)[groups]


def farthest_first_clusters(counts: Tensor, num_clusters: int, iterations: int = 20) -> Tensor:
    """``[R, M]`` one-hot clusters of annotators by their counts ``[R, K, C]``, each counting as often as they labelled.

    The first centre is the annotator with most labels, each further one the farthest by (labels x squared distance).
    """
    labels, points = counts.sum((1, 2)), confusion_points(counts).flatten(1)
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
