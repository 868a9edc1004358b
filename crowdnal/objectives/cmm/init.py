"""The init of CMM: K-means of the annotations, before any model is there."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from crowdnal.aggregation.clustering import confusion_points, fit_clusters, largest_first
from crowdnal.data import Annotations
from crowdnal.functional import label_counts, segment_sum
from crowdnal.functional.segments import annotation_weight, scatter_rows
from crowdnal.objectives.cmm.em import Expected

MOST = 100_000
"""Cells that K-means is made of."""
_FAR = -math.log(torch.finfo(torch.float32).eps)


def initial_counts(cells: Annotations, votes: Tensor, groups: Tensor, num_groups: int) -> Expected:
    """What the first M-step counts: an item's vote proportions for its class, K-means for the label's group.

    Args:
        cells: of :func:`crowdnal.objectives.cmm.em.label_cells`, or the annotations; K >= C.
        votes: ``[N, C]`` vote proportions.
        groups: ``[L]`` group of each cell (annotation).
        num_groups: M.

    Returns:
        Its ``targets`` are the items' votes, and its likelihood is NaN: there is no model yet.
    """
    labels = cells.num_classes
    weight = annotation_weight(cells, None, votes.dtype)
    rows = votes[cells.item] if weight is None else votes[cells.item] * weight.unsqueeze(1)
    key = groups * labels + cells.label
    counts = scatter_rows(rows, key, torch.argsort(key, stable=True), num_groups * labels)
    counts = counts.view(num_groups, labels, votes.shape[1])
    nothing = torch.full((), torch.nan, dtype=votes.dtype, device=votes.device)
    return Expected(counts, counts.sum((1, 2)), segment_sum(rows, cells), nothing)


def cluster_labels(cells: Annotations, votes: Tensor, num_groups: int, seed: int = 0) -> Tensor:
    """``[L]`` group of each (item, label), by how the label differs from the item's votes.

    Features ``v_i · (-log onehot_j)`` (v_i the vote proportions, the zeros of the one-hot vector raised to 1.2e-7),
    their first three principal components, standardised, and K-means on those that occur, weighted by how often. The
    authors' code takes all N·K pairs, those that nobody gave included, with equal weights. From 100,000 cells on, so
    many drawn at random decide where the groups are.

    Where there are fewer different cells than groups, the last groups stay empty; the largest is number 0.
    """
    weight = annotation_weight(cells, None, votes.dtype)
    used = torch.arange(cells.num_annotations, device=votes.device)
    used = used if weight is None else used[weight > 0]
    groups = torch.zeros_like(cells.label)
    if len(used) == 0:
        return groups
    generator = torch.Generator().manual_seed(seed)
    drawn = used if len(used) <= MOST else used[torch.randperm(len(used), generator=generator)[:MOST].to(used.device)]
    times = None if weight is None else weight[drawn].cpu().numpy()
    assign = fit_clusters(_features(cells, votes, drawn), num_groups, seed, components=3, times=times)
    for block in used.split(MOST):
        groups[block] = torch.from_numpy(assign(_features(cells, votes, block))).to(groups)
    return largest_first(groups, weight, num_groups)


def cluster_annotators(annotations: Annotations, votes: Tensor, num_groups: int, seed: int = 0) -> Tensor:
    """``[R]`` group of each annotator, by K-means of their confusions counted against the vote proportions.

    Annotators without labels are in group 0, the largest of the others.
    """
    points = confusion_points(label_counts(votes, annotations)).transpose(1, 2).flatten(1)
    used = torch.bincount(annotations.annotator, minlength=annotations.num_annotators) > 0
    groups = torch.zeros_like(used, dtype=torch.int64)
    if bool(used.any()):
        known = points[used].cpu().numpy()
        groups[used] = torch.from_numpy(fit_clusters(known, num_groups, seed)(known)).to(groups)
    return largest_first(groups, used.double(), num_groups)


def _features(cells: Annotations, votes: Tensor, rows: Tensor) -> np.ndarray:
    """``[len(rows), K]``: a label behind the classes has no votes, and differs from all that have."""
    features = _FAR * F.pad(votes[cells.item[rows]], (0, cells.num_classes - votes.shape[1]))
    return np.asarray(features.scatter_(1, cells.label[rows].unsqueeze(1), 0.0).cpu().numpy())
