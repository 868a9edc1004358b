"""The EM algorithm of CMM: Mena & Ñanculef, A Mixture Model for Grouping Annotations, CIARP 2019, equations 4 to 7.

Everywhere ``log_f [N, C]`` are a classifier's log-probabilities, ``log_beta [M, K, C]`` the groups' confusions
(observed label outermost) and ``log_alpha [M]`` their weights, all in one dtype. Nothing of size N·K·M·C is built:
given item and label, group and class are tied by ``β^m[k, j] α_m`` alone, so that the E-step only needs the groups'
mixture ``B = Σ_m α_m β^m``, and its counts are divided among the groups afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from crowdnal._utils.probability import proportions
from crowdnal.data import Annotations
from crowdnal.functional import mixture_step, segment_sum
from crowdnal.functional.segments import annotation_weight, scatter_rows

FLOOR = 1e-10
"""Least weight of a group, and least probability of a label under a group's confusion."""


class Expected(NamedTuple):
    """What an E-step finds.

    Attributes:
        counts: ``[M, K, C]`` expected number of labels y that group m gave to items of class k.
        groups: ``[M]`` expected number of members (annotations, or annotators).
        targets: ``[N, C]`` expected number of an item's labels that were given to class k: ``r̄`` of equation 7.
        log_likelihood: of the labels (equation 4 without its constant).
    """

    counts: Tensor
    groups: Tensor
    targets: Tensor
    log_likelihood: Tensor


def label_cells(annotations: Annotations) -> Annotations:
    """Each (item, label) that occurs, once, weighted by its frequency ``r_ij``: annotations without annotators (R = 1).

    All that the model knows of the labels; at most as many cells as annotations, in order of item and label.
    """
    key = annotations.item * annotations.num_classes + annotations.label
    order = torch.argsort(key, stable=True)
    cells, times = torch.unique_consecutive(key[order], return_counts=True)
    weight = times.to(torch.get_default_dtype())
    if annotations.weight is not None:
        weight = annotations.weight
        if len(cells) > 0:  # an ordered sum, unlike scatter_add
            weight = torch.segment_reduce(weight[order], "sum", lengths=times, unsafe=True)
    labels = max(annotations.num_classes, 1)
    items = torch.arange(len(annotations) + 1, device=key.device) * labels
    return Annotations(
        torch.searchsorted(cells, items), torch.zeros_like(cells), cells % labels, num_annotators=1,
        num_classes=annotations.num_classes, weight=weight,
    )  # fmt: skip


def expect(log_f: Tensor, log_alpha: Tensor, log_beta: Tensor, cells: Annotations) -> Expected:
    """E-step where every annotation has a group of its own (the paper): ``q_ij(m, k) ∝ β^m[k, j] f_k α_m``.

    Args:
        log_f: ``[N, C]``.
        log_alpha: ``[M]``.
        log_beta: ``[M, K, C]``.
        cells: of the N items, as :func:`label_cells` makes them; its cost is independent of the annotators and of M.
    """
    each = log_alpha[:, None, None] + log_beta
    mixture = each.logsumexp(0)
    nll, classes = _link(log_f, mixture, cells)
    weight = annotation_weight(cells, None, log_f.dtype)
    rows = classes if weight is None else classes * weight.unsqueeze(1)
    counts = (each - mixture).exp() * _by_label(rows, cells)
    likelihood = -(nll.sum() if weight is None else (nll * weight).sum())
    return Expected(counts, counts.sum((1, 2)), segment_sum(rows, cells), likelihood)


def expect_annotators(log_f: Tensor, log_alpha: Tensor, log_beta: Tensor, annotations: Annotations) -> Expected:
    """E-step where all labels of an annotator come from one group (not in the paper), which identifies the groups.

    ``p(labels of a) = Σ_m α_m Π_n Σ_k f_k β^m[k, y_n]``. Works through the groups twice, so that nothing larger than
    ``[nnz, C]`` is kept. ``groups`` counts annotators.
    """
    weight = annotation_weight(annotations, None, log_f.dtype)
    joint = log_alpha + _evidence(group_log_probs(log_f, log_beta, annotations), annotations)
    groups = joint.softmax(1)
    counts, targets = torch.zeros_like(log_beta), torch.zeros_like(log_f)
    for m, matrix in enumerate(log_beta):
        mine = groups[annotations.annotator, m]
        mine = mine if weight is None else mine * weight
        rows = _link(log_f, matrix, annotations)[1] * mine.unsqueeze(1)
        counts[m] = _by_label(rows, annotations)
        targets += segment_sum(rows, annotations)
    members = groups[torch.bincount(annotations.annotator, minlength=annotations.num_annotators) > 0].sum(0)
    return Expected(counts, members, targets, joint.logsumexp(1).sum())


def maximise(expected: Expected, smoothing: float = 0.0, proportions_of: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """M-step, equation 6: ``log_alpha [M]`` and ``log_beta [M, K, C]``.

    Args:
        expected: of an E-step.
        smoothing: pseudo-count added to every group and to every cell of every confusion; the authors' code adds 1.
        proportions_of: ``[K, C]``, columns sum to 1: the cells' are in these proportions, and ``smoothing`` their mean.
    """
    cells = smoothing if proportions_of is None else smoothing * len(proportions_of) * proportions_of
    groups, counts = expected.groups + smoothing, expected.counts + cells
    return proportions(groups, 0, FLOOR).log(), proportions(counts, 1, FLOOR).log()


def group_log_probs(log_f: Tensor, log_beta: Tensor, annotations: Annotations) -> Tensor:
    """``log p_m(y_n | x_i) = log Σ_k f_k β^m[k, y_n]`` of each annotation and group, ``[nnz, M]``: equation 2."""
    return -torch.stack([_link(log_f, matrix, annotations)[0] for matrix in log_beta], 1)


def group_posteriors(log_probs: Tensor, log_weights: Tensor, annotations: Annotations) -> Tensor:
    """``p(g | a) ∝ p(g) Π_n p_g(y_n | x_n)`` over all labels of annotator a, ``[R, M]``: section 3.4.

    Args:
        log_probs: ``[nnz, M]`` of :func:`group_log_probs`.
        log_weights: log p(g), ``[M]``, or ``[nnz, M]`` where it depends on the item: then an annotator's is the mean
            over the items they labelled.
        annotations: R annotators. One without labels has p(g).
    """
    evidence = _evidence(log_probs, annotations)
    if log_weights.dim() == 1:
        return (log_weights + evidence).softmax(1)
    rows = torch.cat([log_weights.exp(), torch.ones_like(log_weights[:, :1])], 1)
    sums = scatter_rows(rows, annotations.annotator, annotations.order, annotations.num_annotators)
    everyone = log_weights.exp().mean(0) if len(log_weights) else torch.ones_like(evidence[0]) / evidence.shape[1]
    own = torch.where(sums[:, -1:] > 0, sums[:, :-1] / sums[:, -1:].clamp(min=1), everyone)
    return (own.clamp(min=FLOOR).log() + evidence).softmax(1)


def as_one(annotations: Annotations) -> Annotations:
    """The annotations, as if all were given by one annotator."""
    if annotations.num_annotators == 1:
        return annotations
    return annotations.regroup(annotations.annotator.new_zeros(1).expand(annotations.num_annotators), 1)


def _link(log_f: Tensor, log_confusion: Tensor, annotations: Annotations) -> tuple[Tensor, Tensor]:
    """Each label's ``-log Σ_k f_k A[k, y]`` ``[nnz]`` and the posterior of its item's class ``[nnz, C]``."""
    return mixture_step(log_f, log_confusion.unsqueeze(0), as_one(annotations))


def _by_label(rows: Tensor, annotations: Annotations) -> Tensor:
    """``[K, C]`` sums of rows ``[nnz, C]``."""
    label = annotations.label
    return scatter_rows(rows, label, torch.argsort(label, stable=True), annotations.num_classes)


def _evidence(log_probs: Tensor, annotations: Annotations) -> Tensor:
    """``[R, M]`` weighted sums of ``[nnz, M]``."""
    weight = annotation_weight(annotations, None, log_probs.dtype)
    rows = log_probs if weight is None else log_probs * weight.unsqueeze(1)
    return scatter_rows(rows, annotations.annotator, annotations.order, annotations.num_annotators)
