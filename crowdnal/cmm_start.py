"""Where CMM starts: K-means of the annotations, before any model is there."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from crowdnal._extras import require
from crowdnal.annotations import Annotations
from crowdnal.cmm_em import Expected
from crowdnal.functional import label_counts, segment_sum
from crowdnal.functional._reduction import annotation_weight
from crowdnal.functional.mix import scatter_rows

_EPS = float(torch.finfo(torch.float32).eps)
_BATCH = 1024


def starting_counts(cells: Annotations, shares: Tensor, groups: Tensor, num_groups: int) -> Expected:
    """What the first M-step counts: the shares of an item's votes for its class, K-means for the label's group.

    Args:
        cells: of :func:`crowdnal.cmm_em.label_cells`, or the annotations; K = C.
        shares: ``[N, C]`` of the items' votes.
        groups: ``[L]`` group of each cell (annotation).
        num_groups: M.

    Returns:
        Its ``targets`` are the items' votes, and its likelihood is NaN: there is no model yet.
    """
    labels = cells.num_classes
    weight = annotation_weight(cells, None, shares.dtype)
    rows = shares[cells.item] if weight is None else shares[cells.item] * weight.unsqueeze(1)
    key = groups * labels + cells.label
    counts = scatter_rows(rows, key, torch.argsort(key, stable=True), num_groups * labels)
    counts = counts.view(num_groups, labels, labels)
    nothing = torch.full((), torch.nan, dtype=shares.dtype, device=shares.device)
    return Expected(counts, counts.sum((1, 2)), segment_sum(rows, cells), nothing)


def cluster_labels(cells: Annotations, shares: Tensor, num_groups: int, seed: int = 0) -> Tensor:
    """``[L]`` group of each (item, label), by how the label differs from the item's votes.

    Features ``v_i · (-log onehot_j)`` (v_i the shares of the votes, the zeros of the one-hot vector raised to 1.2e-7),
    their first three principal components, standardised, and K-means on those that occur, weighted by how often. The
    authors' code takes all N·K pairs, those that nobody gave included, with equal weights.

    Where there are fewer different cells than groups, the last groups stay empty.
    """
    far = -torch.log(torch.tensor(_EPS, dtype=shares.dtype)).item()
    features = far * shares[cells.item]
    features.scatter_(1, cells.label.unsqueeze(1), 0.0)
    weight = annotation_weight(cells, None, shares.dtype)
    used = torch.ones_like(cells.label, dtype=torch.bool) if weight is None else weight > 0
    groups = torch.zeros_like(cells.label)
    if bool(used.any()):
        times = None if weight is None else weight[used].cpu().numpy()
        found = cluster(features[used].cpu().numpy(), num_groups, seed, components=3, times=times)
        groups[used] = torch.from_numpy(found).to(groups)
    return groups


def cluster_annotators(annotations: Annotations, shares: Tensor, num_groups: int, seed: int = 0) -> Tensor:
    """``[R]`` group of each annotator, by K-means of their confusions counted against the votes' shares.

    One label is added to every cell, so that who gave few labels is near everyone's middle; annotators without any are
    in group 0.
    """
    counts = label_counts(shares, annotations).transpose(1, 2) + 1
    confusion = (counts / counts.sum(2, keepdim=True)).flatten(1)
    used = torch.bincount(annotations.annotator, minlength=annotations.num_annotators) > 0
    groups = torch.zeros_like(used, dtype=torch.int64)
    if bool(used.any()):
        groups[used] = torch.from_numpy(cluster(confusion[used].cpu().numpy(), num_groups, seed)).to(groups)
    return groups


def cluster(
    points: np.ndarray,
    num_groups: int,
    seed: int,
    *,
    components: int | None = None,
    times: np.ndarray | None = None,
) -> np.ndarray:
    """``[L]`` K-means groups of points ``[L, D]``, L > 0, standardised; as many as there are different points at most.

    The largest group has number 0, so that equal starts are numbered alike.
    """
    decomposition = require("sklearn.decomposition", extra="train")
    clusters = require("sklearn.cluster", extra="train")
    if (points == points[0]).all():
        return np.zeros(len(points), dtype=np.int64)
    if components is not None:
        kept = min(components, *points.shape)
        points = decomposition.PCA(n_components=kept, random_state=seed).fit_transform(points)
    spread = points.std(0)
    points = (points - points.mean(0)) / np.where(spread > 1e-12, spread, 1.0)
    different = len(np.unique(points.round(9), axis=0))
    means = clusters.MiniBatchKMeans(
        min(num_groups, different), random_state=seed, batch_size=_BATCH, n_init=3, reassignment_ratio=0.0
    )
    found = means.fit(points, sample_weight=times).labels_.astype(np.int64)
    size = np.bincount(found, weights=times, minlength=num_groups)
    return np.argsort(np.argsort(-size, kind="stable"), kind="stable")[found]
