"""The fused losses on `Annotations`: softmax link, mixture link, joint link."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from crowdnal.data import Annotations
from crowdnal.functional._autograd._function import (
    Normalization,
    check_confusion,
    check_shape,
    index_of,
    normalization_kind,
    promote_beside,
)
from crowdnal.functional._autograd.joint_link import JointLink, joint_loss
from crowdnal.functional._autograd.mixture_link import MixtureLink, mixture_loss
from crowdnal.functional._autograd.softmax_link import SoftmaxLink, softmax_loss
from crowdnal.functional.prior import DirichletPrior
from crowdnal.functional.reduction import Reduction, reduction_weights
from crowdnal.functional.segments import annotation_weight
from crowdnal.functional.sparse import compact
from crowdnal.reference import common_scores

__all__ = ["DirichletPrior", "crowd_cross_entropy", "crowd_marginal_nll", "crowd_mixture_nll", "crowd_posterior"]

_SMALL = 32
"""Classes up to which what annotators have in common is cheaper in the op of a step than as a product before it."""

_softmax_link, _mixture_link, _joint_link = SoftmaxLink.op, MixtureLink.op, JointLink.op


def crowd_cross_entropy(
    scores: Tensor,
    confusion: Tensor,
    annotations: Annotations,
    *,
    shared: Tensor | None = None,
    mixing: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    sparse_grad: bool = False,
    prior: DirichletPrior | None = None,
) -> Tensor:
    """Cross-entropy of softmax(h_n) against every observed label: the softmax link.

    h_n = scores_i W_r [+ shared_i], or with `mixing` mixing_n shared_i + (1 - mixing_n) scores_i W_r.

    The link of CrowdLayer (Rodrigues & Pereira 2018, section 4), CoNAL and CCC.

    Args:
        scores: [B, C], what is mixed (probabilities for CrowdLayer); any floating dtype.
        confusion: [R, C, K], free weights, `[true, observed]`; float16 and bfloat16 are read as they are stored, summed
            in float32.
        annotations: B items, R annotators, labels in 0..K-1.
        shared: [B, K], added to the scores of all annotations of an item.
        mixing: [nnz] in 0..1, the share of `shared` in each annotation's scores (CoNAL, Chu et al. 2021, eq. 4).
        weight: [nnz], not negative; default the annotations' own weight.
        reduction: "mean" over annotations (weighted: sum(w l) / sum(w)), "sum", "none" ([nnz], times weight),
            "item_mean" (mean over the annotated items of each one's weighted mean), or "per_item" (their sum divided by
            the number of annotated items: 1/N sum_i sum_r, as CoNAL, CCC and Tanno et al. print or code it).
        sparse_grad: the gradient of confusion is a sparse tensor of the matrices that the batch touched, so that time
            and memory of a step do not depend on R; for `torch.optim.SparseAdam` or SGD. Not under `torch.compile`.
        prior: of the rows softmax(W_r + common), added to the loss; not with "none". If it has something `common`, the
            scores are probabilities, and `shared` is log(scores exp(common)) where it is not given.

    Returns:
        [] or [nnz], float32 at least. Without annotations: 0, with zero gradients.

    Raises:
        ValueError: if shapes do not fit or the reduction is unknown.
    """
    check_confusion(confusion, annotations, 2)
    num_items = annotations.num_items
    check_shape("scores", scores, num_items, confusion.shape[1], meaning="[num_items, C]")
    if shared is not None:
        check_shape("shared", shared, num_items, confusion.shape[2], meaning="[num_items, num_classes]")
    if mixing is not None:
        if shared is None:
            raise ValueError("mixing says how much of shared there is in each annotation: give shared too")
        check_shape("mixing", mixing, annotations.num_annotations, meaning="[num_annotations]")
    if prior is not None:
        prior = _checked(prior, confusion, annotations, reduction, sparse_grad)
    confusion, index = compact(confusion, annotations) if sparse_grad else (confusion, index_of(annotations))
    confusion, scores, shared, mixing = promote_beside(confusion, scores, shared, mixing)
    if prior is not None and prior.common is not None and shared is None:
        if scores.device.type != "cpu" or max(prior.common.shape) > _SMALL:
            shared = common_scores(scores, _constant(prior.common, scores.dtype))
    weight, mean = reduction_weights(annotations, weight, reduction, scores.dtype)
    each = reduction == "none"
    inside = None if each else weight
    inputs = (scores, confusion, shared, mixing, inside, *index, annotations.label, mean)
    if not each:
        return softmax_loss(*inputs, prior=_like(prior, scores.dtype))
    nll = _softmax_link(*inputs)[1]
    return nll if weight is None else nll * weight


def crowd_mixture_nll(
    log_probs: Tensor,
    confusion: Tensor,
    annotations: Annotations,
    *,
    normalization: Normalization = "softmax",
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    sparse_grad: bool = False,
    prior: DirichletPrior | None = None,
) -> Tensor:
    """Negative log-likelihood -log sum_k p_i[k] A_r[k, y] of every observed label: the mixture link, in log space.

    The link of trace regularisation (Tanno et al. 2019, eq. 3), CMM and GeoCrowdNet.

    Args:
        log_probs: [B, C], log-probabilities of the true class (`log_softmax` of the logits).
        confusion: [R, K, C], **observed label outermost**, stored values; read as for `crowd_cross_entropy`.
        annotations: B items, R annotators, labels in 0..K-1.
        normalization: how stored values become A, for each true class over the observed labels: "softmax",
            "softplus" (softplus divided by its sum), or "none" (they are log A already).
        weight: [nnz], not negative; default the annotations' own weight.
        reduction: as for `crowd_cross_entropy`.
        sparse_grad: as for `crowd_cross_entropy`.
        prior: of the rows A_r[k], without ``common``; as for `crowd_cross_entropy`.

    Returns:
        [] or [nnz], float32 at least. Without annotations: 0, with zero gradients.

    Raises:
        ValueError: if shapes do not fit, or reduction or normalization are unknown.
    """
    kind = normalization_kind(normalization)
    check_confusion(confusion, annotations, 1)
    check_shape("log_probs", log_probs, annotations.num_items, confusion.shape[2], meaning="[num_items, C]")
    if prior is not None:
        prior = _checked(prior, confusion.transpose(1, 2), annotations, reduction, sparse_grad)
        if prior.common is not None:
            raise ValueError("prior.common is of the softmax link: leave it out")
        prior = prior._replace(counts=prior.counts.t())
    confusion, index = compact(confusion, annotations) if sparse_grad else (confusion, index_of(annotations))
    confusion, log_probs = promote_beside(confusion, log_probs)
    weight, mean = reduction_weights(annotations, weight, reduction, log_probs.dtype)
    each = reduction == "none"
    inside = None if each else weight
    inputs = (log_probs, confusion, inside, *index, annotations.label, kind, mean)
    if not each:
        return mixture_loss(*inputs, prior=_like(prior, log_probs.dtype))
    nll = _mixture_link(*inputs)[1]
    return nll if weight is None else nll * weight


def crowd_marginal_nll(
    log_prior: Tensor,
    confusion: Tensor,
    annotations: Annotations,
    *,
    normalization: Normalization = "softmax",
    weight: Tensor | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Negative log-likelihood of all labels of an item together, its true class summed out: the joint link.

    -log sum_k prior_i[k] prod_n A_r[k, y_n]^w_n over the annotations n of item i, in log space: the likelihood of
    Dawid & Skene (1979), and with a classifier as prior the left side of Platanios et al. (2020, eq. 9), whose right
    side, as printed, is a sum of `crowd_mixture_nll`.

    Args:
        log_prior: [B, C], log-probabilities of the true class (`log_softmax` of the logits); -inf is legal.
        confusion: [R, K, C], **observed label outermost**, stored values.
        annotations: B items, R annotators, labels in 0..K-1.
        normalization: as for `crowd_mixture_nll`.
        weight: [nnz], not negative; how often a label counts, default the annotations' own weight.
        reduction: "mean" over annotated items (what "per_item" is elsewhere), "sum", or "none" ([B]).

    Returns:
        [] or [B], float32 at least. An item without annotations has 0 and no gradient; one for which every class is
        impossible has inf.

    Raises:
        ValueError: if shapes do not fit, or reduction or normalization are unknown.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is not one of 'mean', 'sum', 'none'")
    inputs = _joint(log_prior, confusion, annotations, normalization, weight, reduction == "mean")
    return _joint_link(*inputs)[1] if reduction == "none" else joint_loss(*inputs)


def crowd_posterior(
    log_prior: Tensor,
    confusion: Tensor,
    annotations: Annotations,
    *,
    normalization: Normalization = "softmax",
    weight: Tensor | None = None,
) -> Tensor:
    """Posterior over each item's true class under the joint link: the E-step of Dawid & Skene (1979, eq. 2.5).

    Args:
        log_prior: as for `crowd_marginal_nll`, here and below.
        confusion: [R, K, C], **observed label outermost**, stored values.
        annotations: B items, R annotators, labels in 0..K-1.
        normalization: as for `crowd_mixture_nll`.
        weight: [nnz].

    Returns:
        [B, C], rows sum to 1, float32 at least. An item without annotations has its prior; one for which every class
        is impossible has a row of 0.

    Raises:
        ValueError: if shapes do not fit or normalization is unknown.
    """
    return _joint_link(*_joint(log_prior, confusion, annotations, normalization, weight, False))[2]


def _checked(
    prior: DirichletPrior, confusion: Tensor, annotations: Annotations, reduction: Reduction, sparse_grad: bool
) -> DirichletPrior:
    """Of matrices [R, C, K]; with sparse gradients, of those in the batch."""
    num_annotators, *sizes = confusion.shape
    if reduction == "none":
        raise ValueError('reduction="none" has no place for a prior, which is of annotators: leave it out')
    check_shape("prior.counts", prior.counts, *sizes, meaning="[C, K]")
    check_shape("prior.labels_given", prior.labels_given, num_annotators, meaning="[num_annotators]")
    if prior.common is not None:
        check_shape("prior.common", prior.common, *sizes, meaning="[C, K]")
    if not sparse_grad:
        return prior
    return prior._replace(labels_given=prior.labels_given[annotations.active_annotators])


def _like(prior: DirichletPrior | None, dtype: torch.dtype) -> DirichletPrior | None:
    """In the dtype that is computed in, and without gradients."""
    if prior is None:
        return None
    return DirichletPrior._make(_constant(part, dtype) for part in prior)


def _constant(tensor: Tensor | None, dtype: torch.dtype) -> Any:
    if tensor is None:
        return None
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _joint(
    log_prior: Tensor,
    confusion: Tensor,
    annotations: Annotations,
    normalization: Normalization,
    weight: Tensor | None,
    mean: bool,
) -> tuple[Any, ...]:
    """The arguments of the joint link."""
    kind = normalization_kind(normalization)
    check_confusion(confusion, annotations, 1)
    check_shape("log_prior", log_prior, annotations.num_items, confusion.shape[2], meaning="[num_items, C]")
    confusion, log_prior = promote_beside(confusion, log_prior)
    weight = annotation_weight(annotations, weight, log_prior.dtype)
    return log_prior, confusion, weight, *index_of(annotations), annotations.label, kind, mean
