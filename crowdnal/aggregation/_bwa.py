"""Bayesian weighted average: the votes, weighted by how far each annotator is from the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crowdnal._utils.options import check_integer, check_positive, typed
from crowdnal.aggregation._votes import vote_proportions
from crowdnal.aggregation.em import AggregationResult, check_options, say_collapse, weights_of
from crowdnal.data import Annotations
from crowdnal.functional.segments import scatter_rows, sum_rows


@dataclass
class BWAResult(AggregationResult):
    """What `bwa` found.

    Attributes:
        posterior: ``[N, C]`` weighted means of the labels, rows sum to 1.
        precision: ``[R]`` weight of each annotator's labels, above 0.
        converged: whether the last step was smaller than the tolerance.
    """

    posterior: Tensor
    precision: Tensor
    converged: bool


@typed
@torch.no_grad()
def bwa(
    annotations: Annotations,
    *,
    strength: float = 15.0,
    item_strength: float = 1.0,
    max_iterations: int = 500,
    tolerance: float = 1e-4,
    dtype: torch.dtype = torch.float64,
) -> BWAResult:
    """Bayesian weighted average (Li, Rubinstein & Cohn, WWW 2019): labels as numbers 0 and 1, annotators' precisions.

    An item's class proportions are the weighted mean of its labels and the crowd's proportions; an annotator's
    precision has a Gamma prior around that of the votes, so that few labels move it little. As fast as the votes.

    Args:
        annotations: the whole data set. A weight says how often its annotation counts.
        strength: of the precisions' prior, in labels.
        item_strength: of the crowd's proportions in each item's, in labels of precision 1.
        max_iterations: 1 or more.
        tolerance: stop when no probability moves by more; a negative one never stops.
        dtype: of the computation and the result, float64 or float32.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    check_options(annotations, annotations.num_classes, None, None, 0.0, dtype)
    check_integer(1, max_iterations=max_iterations)
    check_positive(strength=strength, item_strength=item_strength)
    a, (weight, _) = annotations, weights_of(annotations, dtype)
    posterior = vote_proportions(a, a.num_classes).to(dtype)
    weight = posterior.new_ones(a.num_annotations) if weight is None else weight
    by_annotator, cell = (a.annotator, a.order, a.num_annotators), a.item * a.num_classes + a.label
    by_cell = cell, torch.argsort(cell, stable=True), posterior.numel()
    number = scatter_rows(weight.unsqueeze(1), *by_annotator).squeeze(1)
    labels_of = sum_rows(weight, a)
    spread = (labels_of.unsqueeze(1) * posterior * (1 - posterior)).sum() / labels_of.sum().clamp(min=1)
    converged = False
    for _ in range(max_iterations):
        # |one-hot(y) - p|^2 of each label, without a tensor of one-hot labels
        own = posterior[a.item, a.label] if a.num_annotations else posterior.new_zeros(0)
        error = posterior.square().sum(1)[a.item] - 2 * own + 1
        wrong = scatter_rows((weight * error).unsqueeze(1), *by_annotator).squeeze(1)
        precision = (strength + number) / (strength * spread + wrong).clamp(min=1e-9)
        each = weight * precision[a.annotator]
        votes = scatter_rows(each.unsqueeze(1), *by_cell).view_as(posterior)
        moved = item_strength * posterior.mean(0) + votes if len(a) else votes
        moved = moved / moved.sum(1, keepdim=True)
        converged = len(a) == 0 or float((moved - posterior).abs().max()) <= tolerance
        posterior = moved
        if converged:
            break
    say_collapse(posterior, a, "bwa")
    return BWAResult(posterior, precision, converged)
