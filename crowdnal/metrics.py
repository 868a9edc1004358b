"""Measures of classifiers and annotators. Confusions are ``[R, C, K]``: row = true class, rows sum to 1."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crowdnal._utils.probability import proportions
from crowdnal.data import Annotations
from crowdnal.functional import label_counts
from crowdnal.functional.segments import scatter_rows

__all__ = [
    "AnnotatorAccuracy",
    "accuracy",
    "annotator_accuracy",
    "balanced_accuracy",
    "confusion_divergence",
    "confusion_error",
    "empirical_confusion",
    "expected_calibration_error",
    "reliability",
    "reliability_correlation",
    "spammer_score",
]


def accuracy(prediction: Any, truth: Any) -> float:
    """Share of items whose prediction is the truth, in [0, 1].

    Args:
        prediction: ``[N]`` classes, or ``[N, C]`` scores (of equal scores the lowest class counts).
        truth: ``[N]`` classes.

    Raises:
        ValueError: if there are no items or the shapes do not fit.
    """
    prediction, truth = torch.as_tensor(prediction), torch.as_tensor(truth)
    _check_truth(truth, prediction.shape[0] if prediction.ndim in (1, 2) else -1)
    if prediction.ndim == 2:
        prediction = prediction.argmax(1)
    return float((prediction == truth.to(prediction.device)).double().mean())


def expected_calibration_error(probs: Any, truth: Any, bins: int = 15) -> float:
    """Gap between confidence and accuracy, ``Σ_m |B_m|/N · |acc(B_m) - conf(B_m)|``, in [0, 1].

    Bins of equal width over the probability of the predicted class, closed on the right (Guo et al. 2017,
    eq. 3).

    Args:
        probs: ``[N, C]``, rows sum to 1.
        truth: ``[N]`` classes.
        bins: number of bins.

    Raises:
        ValueError: naming a row of probs that is no distribution.
    """
    probs, truth = torch.as_tensor(probs).detach().double(), torch.as_tensor(truth)
    _check_truth(truth, probs.shape[0] if probs.ndim == 2 else -1)
    if bins < 1:
        raise ValueError(f"bins must be 1 or more, got {bins}")
    _check_rows(probs, "probs", "apply softmax to logits")
    confidence, prediction = probs.max(1)
    gap = (prediction == truth.to(probs.device)).double() - confidence
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=probs.device)[1:-1]
    inside = torch.bucketize(confidence, edges)
    return float(torch.stack([gap[inside == m].sum().abs() for m in range(bins)]).sum()) / len(truth)


class AnnotatorAccuracy(NamedTuple):
    """How often annotators are right, as far as their labels tell.

    Attributes:
        mean: ``[R]`` in (0, 1), shrunk to the crowd's by as much as few labels warrant.
        low: ``[R]`` of a 90 % interval.
        high: ``[R]``.
    """

    mean: Tensor
    low: Tensor
    high: Tensor


def annotator_accuracy(posterior: Any, annotations: Annotations) -> AnnotatorAccuracy:
    """Share of each annotator's labels that are right, from the posterior of the items and the labels given.

    A label counts as right with the probability that its item is of that class. The shares have a Beta prior around the
    crowd's, whose strength is the one of greatest marginal likelihood (beta-binomial empirical Bayes, 1 to 1,024
    labels); the interval is that of a normal distribution of the log-odds with the Beta's moments. An annotator without
    labels is the crowd's.

    Args:
        posterior: ``[N, C]``, rows sum to 1, or ``[N]`` known classes.
        annotations: of the N items; weights count.

    Returns:
        float64, on the annotations' device.

    Raises:
        ValueError: if shapes do not fit.
    """
    posterior = torch.as_tensor(posterior, device=annotations.device).detach()
    if posterior.ndim not in (1, 2) or posterior.shape[0] != annotations.num_items:
        raise ValueError(
            f"posterior must be [N, C] or [N] for N = {annotations.num_items} items, got {list(posterior.shape)}"
        )
    if posterior.ndim == 1:
        right = (posterior[annotations.item] == annotations.label).double()
    else:  # a label beyond the classes is wrong
        beyond = annotations.label >= posterior.shape[1]
        label = annotations.label.where(~beyond, 0)
        right = posterior.double()[annotations.item, label].where(~beyond, 0) if len(label) else label.double()
    weight = torch.ones_like(right) if annotations.weight is None else annotations.weight.detach().double()
    by_annotator = annotations.annotator, annotations.order, annotations.num_annotators
    hits, given = scatter_rows(torch.stack([weight * right, weight], 1), *by_annotator).unbind(1)
    hits = hits.minimum(given)
    crowd = (hits.sum() + 1) / (given.sum() + 2)
    strengths = 2.0 ** torch.arange(11, dtype=torch.float64, device=right.device)
    best = torch.stack([_beta_binomial(hits, given - hits, s * crowd, s * (1 - crowd)) for s in strengths]).argmax()
    a, b = hits + strengths[best] * crowd, given - hits + strengths[best] * (1 - crowd)
    middle, width = a.digamma() - b.digamma(), 1.645 * (a.polygamma(1) + b.polygamma(1)).sqrt()
    return AnnotatorAccuracy(a / (a + b), (middle - width).sigmoid(), (middle + width).sigmoid())


def _beta_binomial(hits: Tensor, misses: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Log-likelihood of the numbers ``[R]`` of right and wrong labels under a Beta prior, but for a constant."""
    each = (hits + a).lgamma() + (misses + b).lgamma() - (hits + misses + a + b).lgamma()
    return (each - a.lgamma() - b.lgamma() + (a + b).lgamma()).sum()


def reliability(confusion: Tensor) -> Tensor:
    """Balanced accuracy: mean over the C true classes of the probability of the right label, ``[R]`` in [0, 1].

    That is how often an annotator is right where all true classes are equally common, 1 for one who always is. A class
    without a label (C > K) is never labelled right and counts 0: else somebody who is wrong about every third item
    could have 1. Labels beyond the classes (K > C) are wrong.

    Args:
        confusion: ``[R, C, K]``, rows sum to 1.
    """
    _check_confusion(confusion)
    return balanced_accuracy(confusion.diagonal(dim1=1, dim2=2), confusion.shape[1])


def balanced_accuracy(right: Tensor, num_classes: int) -> Tensor:
    """:func:`reliability` from the diagonals ``[..., min(C, K)]`` alone, where confusions would not fit; unchecked."""
    return right.sum(-1) / num_classes


def spammer_score(confusion: Tensor) -> Tensor:
    """How much an annotator's label says about the true class: 0 a spammer, 1 perfect (Raykar & Yu 2012).

    A spammer's label does not depend on the true class: all rows are equal. The score is the squared
    distance between rows over all pairs, ``Σ_{c<c'} ‖A_c - A_c'‖²``, divided by its maximum over
    row-stochastic matrices. For K >= C that is ``C (C - 1)`` as in the paper, reached where every class has
    a label of its own (a permuted one too: who is always wrong informs); for K < C it is ``C² - Σ_k n_k²``,
    where the C classes share the K labels as evenly as they can.

    Args:
        confusion: ``[R, C, K]``, rows sum to 1.

    Returns:
        ``[R]`` in [0, 1]; 0 where C or K is 1 and a label can say nothing.
    """
    _check_confusion(confusion)
    classes, labels = confusion.shape[1:]
    share, rest = divmod(classes, labels)
    largest = classes**2 - (labels - rest) * share**2 - rest * (share + 1) ** 2
    confusion = confusion if confusion.is_floating_point() else confusion.float()
    spread = confusion - confusion.mean(1, keepdim=True)
    return (classes * spread.square().sum((1, 2)) / max(largest, 1)).clamp(0, 1)


def empirical_confusion(posterior: Any, annotations: Annotations, *, smoothing: float = 0.0) -> Tensor:
    """Confusion by counting: ``A_r[c, k] ∝ smoothing/K + Σ_{n of r, y_n = k} w_n · posterior[i_n, c]``.

    The M-step of Dawid & Skene (1979, eq. 2.3); with known classes, plain relative frequencies.

    Args:
        posterior: ``[N, C]`` probabilities of the true classes, or ``[N]`` known classes.
        annotations: of the N items.
        smoothing: pseudo-annotations in each row, spread evenly over the labels.

    Returns:
        ``[R, C, K]`` float64. A row without evidence is uniform.

    Raises:
        ValueError: if shapes do not fit or smoothing is negative.
    """
    posterior = torch.as_tensor(posterior, device=annotations.device).detach()
    if posterior.ndim not in (1, 2) or posterior.shape[0] != annotations.num_items:
        raise ValueError(
            f"posterior must be [N, C] or [N] for N = {annotations.num_items} items, got {list(posterior.shape)}"
        )
    if not 0 <= smoothing < float("inf"):
        raise ValueError(f"smoothing must be finite and not negative, got {smoothing}")
    labels = annotations.num_classes
    if posterior.ndim == 1:
        _check_classes(posterior, labels)
        posterior = torch.nn.functional.one_hot(posterior.long(), labels)
    weight = None if annotations.weight is None else annotations.weight.detach()
    counts = label_counts(posterior.double(), annotations, weight=weight).transpose(1, 2) + smoothing / max(labels, 1)
    return proportions(counts, 2)


def confusion_error(confusion: Tensor, estimate: Tensor) -> float:
    """Mean squared error ``Σ (A - Â)² / (R C)`` of estimated confusions (Tanno et al. 2019), in [0, 2].

    Args:
        confusion: ``[R, C, K]`` true confusions.
        estimate: ``[R, C, K]``.
    """
    _check_pair(confusion, estimate)
    error = (confusion.double() - estimate.detach().double().to(confusion.device)).square().sum((1, 2))
    return float(error.mean()) / confusion.shape[1]


def confusion_divergence(confusion: Tensor, estimate: Tensor) -> float:
    """Jensen-Shannon divergence of estimated from true rows in bits, mean over rows and annotators, in [0, 1].

    The I-JS of Mena & Ñanculef (2019); their G-JS is that of the one confusion of all annotators together,
    ``confusion_divergence(true_mean[None], estimated_mean[None])``.

    Args:
        confusion: ``[R, C, K]`` true confusions.
        estimate: ``[R, C, K]``.
    """
    _check_pair(confusion, estimate)
    p, q = confusion.detach().double(), estimate.detach().double().to(confusion.device)
    middle = (p + q) / 2
    both = [torch.special.xlogy(x, x) - torch.special.xlogy(x, middle) for x in (p, q)]
    return max(float((both[0] + both[1]).sum(2).mean()) / (2 * math.log(2)), 0.0)


def reliability_correlation(truth: Tensor, estimate: Tensor) -> float:
    """Pearson correlation, over annotators, of true and estimated reliability, in [-1, 1].

    Args:
        truth: ``[R]`` reliabilities, or ``[R, C, K]`` confusions whose :func:`reliability` is meant.
        estimate: either.

    Returns:
        NaN where it is not defined: one annotator, or all equal.
    """
    for name, value in (("truth", truth), ("estimate", estimate)):
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}: torch.as_tensor makes one")
    both = [reliability(x) if x.ndim == 3 else x for x in (truth.detach(), estimate.detach())]
    if both[0].ndim != 1 or both[0].shape != both[1].shape:
        raise ValueError(
            f"truth and estimate must each be [R] or [R, C, K] with one R, got {list(truth.shape)} and "
            f"{list(estimate.shape)}"
        )
    x, y = (value.double().cpu() for value in both)
    if len(x) == 0 or x.min() == x.max() or y.min() == y.max():
        return float("nan")
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y / (x.norm() * y.norm())).clamp(-1, 1))


def _check_truth(truth: Tensor, items: int) -> None:
    if truth.ndim != 1 or truth.is_floating_point() or truth.shape[0] != items or items == 0:
        raise ValueError(
            "truth must be [N] integers beside predictions [N] or probabilities [N, C], N > 0; got "
            f"{truth.dtype} {list(truth.shape)} beside {'another shape' if items < 0 else f'N = {items}'}"
        )


def _check_classes(truth: Tensor, classes: int) -> None:
    if truth.is_floating_point():
        raise ValueError(f"posterior [N] must hold known classes as integers, got {truth.dtype}")
    bad = (truth < 0) | (truth >= classes)
    if bool(bad.any()):
        i = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"posterior[{i}] is class {int(truth[i])}, outside [0, {classes}); select the items whose class "
            "is known, or give [N, C] probabilities"
        )


def _check_pair(confusion: Tensor, estimate: Tensor) -> None:
    _check_confusion(confusion)
    if not isinstance(estimate, Tensor) or estimate.shape != confusion.shape:
        raise ValueError(
            f"estimate must be {list(confusion.shape)} as confusion is, got "
            f"{list(estimate.shape) if isinstance(estimate, Tensor) else type(estimate).__name__}"
        )
    _check_confusion(estimate, "estimate")


def _check_confusion(confusion: Tensor, name: str = "confusion") -> None:
    if not isinstance(confusion, Tensor):
        raise ValueError(f"{name} must be a tensor [R, C, K], got {type(confusion).__name__}: use torch.as_tensor")
    if confusion.ndim != 3 or 0 in confusion.shape[1:]:
        raise ValueError(
            f"{name} must be [R, C, K], true class before label, got {list(confusion.shape)}; "
            f"add a dimension for a single annotator: {name}[None]"
        )
    rows = confusion.detach().flatten(0, 1)
    _check_rows(rows, name, "normalise over the last dimension", confusion.shape[1])


def _check_rows(rows: Tensor, name: str, fix: str, classes: int = 0) -> None:
    bad = ~((rows >= 0).all(1) & ((rows.double().sum(1) - 1).abs() < 1e-2))
    if bool(bad.any()):
        i = int(bad.nonzero()[0, 0])
        where = f"{i // classes}, {i % classes}" if classes else str(i)
        raise ValueError(f"{name}[{where}] is {rows[i].tolist()[:8]}, not probabilities that sum to 1; {fix}")
