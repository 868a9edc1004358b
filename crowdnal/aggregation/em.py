"""The pieces of EM on annotations that the methods here share with objectives whose prior is a classifier.

The E-step itself is :func:`crowdnal.functional.em_step`. Confusions are ``log_confusion [R, K, C]`` and expected counts
``counts [R, K, C]``, observed label outermost; ``gold [N]`` are known true classes, -1 where unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from crowdnal._utils.probability import proportions
from crowdnal._utils.warn import warn
from crowdnal.aggregation._votes import vote_proportions
from crowdnal.data import Annotations
from crowdnal.functional import label_counts
from crowdnal.functional.segments import annotation_weight

FLOOR = 1e-10
"""Least expected count of a label that an annotator gave, and least probability of a class that is in play."""
Prior = Tensor | float | Literal["crowd"] | None
"""Of confusions: pseudo-counts ``[C, K]`` or ``[R, C, K]``; so many of the crowd's; as many as suit it; none."""
STRENGTHS = (1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0)
"""Labels of each true class that the crowd's confusion can count for in that of each annotator."""
_COLLAPSED = 0.9
"""Share of the items that the votes give the one class that all have, below which a method has collapsed."""
_HEADROOM = 1024
"""A log-likelihood is at most this many times the sum of the weights."""


class AggregationResult:
    """Base of what aggregation methods find, all of which have a posterior ``[N, C]`` whose rows sum to 1."""

    posterior: Tensor

    @property
    def labels(self) -> Tensor:
        """``[N]`` most probable class; the lowest of equally probable ones."""
        return self.posterior.argmax(1)


def weights_of(annotations: Annotations, dtype: torch.dtype) -> tuple[Tensor | None, float]:
    """Weights ``[nnz]`` of the annotations (None: 1 each) and their sum, 1 where it is 0.

    Raises:
        ValueError: they are so large that sums overflow in this dtype.
    """
    weight = annotation_weight(annotations, None, dtype)
    if weight is None:
        return None, float(annotations.num_annotations) or 1.0
    total = float(weight.sum())
    if not total < torch.finfo(dtype).max / _HEADROOM:
        n = int(weight.argmax())
        raise ValueError(
            f"annotations.weight[{n}] is {float(weight[n]):g} and the weights' sum {total:g}, too large for {dtype}: "
            "divide all weights by one number"
        )
    return weight, total or 1.0


def iterate(
    maximise: Callable[[], None], expect: Callable[[], float], max_iterations: int, tolerance: float
) -> tuple[list[float], bool]:
    """M-step and E-step in turn until what the E-step returns rises by less than the tolerance.

    Returns:
        What every E-step returned, and whether the last one rose so little.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    if max_iterations < 1:
        raise ValueError(f"max_iterations must be 1 or more, got {max_iterations}")
    if math.isnan(tolerance):
        raise ValueError("tolerance must be a number, got NaN; a negative one never stops")
    values: list[float] = []
    while len(values) < max_iterations:
        maximise()
        values.append(expect())
        if len(values) > 1 and values[-1] - values[-2] < tolerance:
            return values, True
    return values, False


def log_proportions(counts: Tensor, pseudo_counts: Tensor | None) -> Tensor:
    """The M-step of confusions: log of counts ``[R, K, C]``, plus pseudo-counts, as distributions over K.

    A label that an annotator gave counts FLOOR at least; one they never gave is impossible; nothing at all is uniform.
    """
    gave = counts.sum(2, keepdim=True) > 0
    counts = counts if pseudo_counts is None else counts + pseudo_counts
    return proportions(torch.where(gave, counts.clamp(min=FLOOR), counts), 1).log_()


def possible(gold: Tensor, classes: int) -> Tensor:
    """``[N, C]``: the known class alone, every class where it is unknown."""
    return (gold.unsqueeze(1) == torch.arange(classes, device=gold.device)) | (gold < 0).unsqueeze(1)


def say_collapse(posterior: Tensor, annotations: Annotations, method: str) -> None:
    """Warns where a method makes all items one class and the votes clearly do not: it has stopped to tell them apart.

    Args:
        posterior: ``[N, C]`` that the method found.
        annotations: the N items'.
        method: its name.
    """
    votes = vote_proportions(annotations, posterior.shape[1])
    first = votes.amax(1)
    decided = (votes == first.unsqueeze(1)).sum(1) == 1  # a tie, or no label that weighs, says nothing
    found = posterior[decided].argmax(1)
    if len(found) < 2 or bool((found != found[0]).any()):
        return
    agree = float((votes[decided].argmax(1) == found[0]).double().mean())
    if agree < _COLLAPSED:
        warn(
            f"{method} makes every item class {int(found[0])}, where the votes do so with {agree:.0%} of them: these "
            "labels are too few to know annotators by. Use aggregate(annotations), which tries methods on held-out "
            "labels, or the votes (aggregate(annotations, 'majority-vote'))"
        )


def standard_errors(ahead: Tensor) -> float:
    """By how many standard errors the sum of differences ``[n]`` is above 0; 0 where fewer than two say nothing."""
    error = float(ahead.std()) * len(ahead) ** 0.5 if len(ahead) > 1 else 0.0
    return float(ahead.sum()) / error if error > 0 else 0.0


def crowd_confusion(
    posterior: Tensor, annotations: Annotations, weight: Tensor | None, counted: Tensor | None = None
) -> Tensor | None:
    """``[C, K]``: the labels of the whole crowd as distributions for each true class; None where that says nothing.

    To be counted against the votes, once: an estimate that moves with the posteriors can drift away from the classes'
    names, and all annotators with it. A single label agrees with itself, which says nothing of who gave it.

    Args:
        posterior: ``[N, C]``.
        annotations: of the N items.
        weight: ``[nnz]`` of them.
        counted: ``[N]`` items to count; those with two labels or more where not given.
    """
    counted = annotations.counts > 1 if counted is None else counted
    if not bool(counted.any()):
        return None
    return pooled_confusion(label_counts(posterior.where(counted.unsqueeze(1), 0), annotations, weight=weight).sum(0))


def pooled_confusion(counts: Tensor) -> Tensor:
    """``[C, K]`` distributions of the labels ``[K, C]`` of everybody, with one label more that is right per class."""
    return proportions(counts + torch.eye(*counts.shape).to(counts), 0, floor=1e-6).t()


def crowd_or_right(posterior: Tensor, annotations: Annotations, weight: Tensor | None, gold: Tensor | None) -> Tensor:
    """:func:`crowd_confusion` ``[C, C]``, known classes counted; as good as right where nothing tells how often."""
    counted = None if gold is None else (annotations.counts > 1) | (gold >= 0)
    found = crowd_confusion(posterior, annotations, weight, counted)
    return proportions(torch.eye(posterior.shape[1]).to(posterior), 1, floor=1e-6) if found is None else found


def crowd_strength(counts: Tensor, crowd: Tensor) -> float:
    """How much annotators resemble each other: the one of STRENGTHS under which their counts are most probable.

    Args:
        counts: ``[R, K, C]`` expected.
        crowd: ``[C, K]`` the mean of their confusions.

    Returns:
        The total of the Dirichlet distribution of a row of their confusions that maximises the evidence of the counts.
    """
    mean = crowd.t().to(counts)
    given = counts.sum(1)

    def evidence(strength: float) -> float:
        prior = strength * mean
        cells = ((counts + prior).lgamma() - prior.lgamma()).sum()
        return float(cells - ((given + strength).lgamma() - math.lgamma(strength)).sum())

    return max(STRENGTHS, key=evidence)


def pseudo_counts_of(prior: Tensor | None, smoothing: float, like: Tensor) -> Tensor | None:
    """``confusion_prior`` and ``smoothing`` as ``[R, K, C]`` or what broadcasts to it, or None."""
    if prior is None:
        return like.new_full((1, 1, 1), smoothing) if smoothing > 0 else None
    return prior.to(like).transpose(-1, -2) + smoothing


def classes_of(initial: Tensor, annotators: int, labels: int) -> int:
    """The number C of true classes of an ``initial_confusion``, after checking it."""
    if initial.dim() != 3 or initial.shape[0] != annotators or initial.shape[2] != labels or initial.shape[1] == 0:
        raise ValueError(
            f"initial_confusion has shape {tuple(initial.shape)} but must be [R, C, K] = ({annotators}, C, {labels}): "
            "a row for each true class"
        )
    if not bool(((initial >= 0) & (initial.sum(2, keepdim=True) - 1).abs().lt(1e-2)).all()):
        raise ValueError("initial_confusion has a row that is no distribution; normalise over the last dimension")
    return initial.shape[1]


def check_features(features: Tensor, annotations: Annotations) -> None:
    """Raises a ValueError for what are no finite features ``[N, D]`` of the N items."""
    if features.dim() != 2 or len(features) != len(annotations) or not features.is_floating_point():
        raise ValueError(
            f"features is {features.dtype} {list(features.shape)} but must be floating point [N, D] with a row for "
            f"each of {len(annotations)} items"
        )
    if not bool(features.isfinite().all()):
        raise ValueError(f"features[{int((~features.isfinite()).any(1).nonzero()[0, 0])}] is not finite")


def check_options(
    annotations: Annotations,
    classes: int,
    gold: Tensor | None,
    prior: Prior,
    smoothing: float,
    dtype: torch.dtype,
) -> None:
    """Raises a ValueError that names what no EM can work with."""
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(f"dtype must be torch.float64 or torch.float32, got {dtype}")
    if classes == 0 or annotations.num_classes == 0:
        raise ValueError("annotations have no classes, as there is no label: give classes (num_classes), or labels")
    check_smoothing(smoothing)
    if gold is not None:
        check_gold(gold, classes, annotations.num_items)
    if prior is not None:
        check_prior(prior, annotations.num_annotators, classes, annotations.num_classes)


def check_smoothing(smoothing: float) -> None:
    """Raises a ValueError unless it is a pseudo-count."""
    if not 0 <= smoothing < math.inf:
        raise ValueError(f"smoothing must be finite and not negative, got {smoothing}")


def check_gold(gold: Tensor, classes: int, items: int | None = None) -> None:
    """Raises a ValueError unless these are known classes, or -1, of so many items."""
    wrong_size = gold.dim() != 1 or (items is not None and len(gold) != items)
    if wrong_size or gold.is_floating_point() or gold.dtype == torch.bool:
        number = "" if items is None else f" for N = {items} items"
        raise ValueError(f"gold must be [N] integers{number}, got {gold.dtype} {list(gold.shape)}")
    bad = (gold < -1) | (gold >= classes)
    if bool(bad.any()):
        i = int(bad.nonzero()[0, 0])
        raise ValueError(f"gold[{i}] is {int(gold[i])}, outside [0, {classes}); mark unknown classes with -1")


def check_prior(prior: Prior, annotators: int, classes: int, labels: int) -> None:
    """Raises a ValueError unless these are pseudo-counts, of all annotators or of each, or what stands for some."""
    if not isinstance(prior, Tensor):
        number = isinstance(prior, float | int) and not isinstance(prior, bool) and 0 <= prior < math.inf
        if not (prior is None or prior == "crowd" or number):
            raise ValueError(f"confusion_prior={prior!r} must be pseudo-counts, their number, 'crowd' or None")
        return
    matrix = (classes, labels)
    if tuple(prior.shape) not in (matrix, (annotators, *matrix)):
        raise ValueError(
            f"confusion_prior has shape {tuple(prior.shape)} but must be [C, K] = {matrix} or one for each of "
            f"{annotators} annotators"
        )
    if not bool(((prior >= 0) & prior.isfinite()).all()):
        raise ValueError("confusion_prior must hold pseudo-counts, finite and not negative")
