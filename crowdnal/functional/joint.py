"""The joint link on `Annotations`: all labels of an item together, its true class summed out."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from crowdnal.annotations import Annotations
from crowdnal.functional import evidence as _evidence
from crowdnal.functional._common import (
    Normalization,
    check_confusion,
    check_shape,
    index_of,
    normalization_kind,
    promote,
    promote_beside,
)
from crowdnal.functional._reduction import annotation_weight
from crowdnal.functional.joint_link import JointLink
from crowdnal.reference import compute_dtype


def evidence(log_confusion: Tensor, annotations: Annotations, *, weight: Tensor | None = None) -> Tensor:
    """What each item's labels say about its true class: out_i[k] = sum over its annotations n of w_n log A_r[k, y_n].

    Args:
        log_confusion: [R, K, C], **observed label outermost**; -inf is legal. Read as by `crowd_cross_entropy`.
        annotations: B items, R annotators, labels in 0..K-1.
        weight: [nnz], default the annotations' own weight; a label of weight 0 adds nothing, whatever its row.

    Returns:
        [B, C], float32 at least; 0 without annotations.

    Raises:
        ValueError: if shapes do not fit.
    """
    check_confusion(log_confusion, annotations, 1)
    (log_confusion,) = promote_beside(log_confusion)
    weight = annotation_weight(annotations, weight, compute_dtype(log_confusion.dtype))
    return _evidence.evidence(log_confusion, weight, index_of(annotations), annotations.label)


def label_counts(posterior: Tensor, annotations: Annotations, *, weight: Tensor | None = None) -> Tensor:
    """Expected number of times annotator r gave label y to items of class k; the adjoint of `evidence`.

    The sufficient statistics of an M-step (Dawid & Skene 1979, eq. 2.3, before normalisation).

    Args:
        posterior: [B, C], probabilities of each item's true class.
        annotations: B items, R annotators, labels in 0..K-1.
        weight: [nnz], default the annotations' own weight.

    Returns:
        [R, K, C], **observed label outermost**, float32 at least.

    Raises:
        ValueError: if shapes do not fit.
    """
    if posterior.dim() != 2 or posterior.shape[0] != annotations.num_items:
        raise ValueError(
            f"posterior has shape {tuple(posterior.shape)}, expected [num_items, C] = ({annotations.num_items}, C)"
        )
    (posterior,) = promote(posterior)
    weight = annotation_weight(annotations, weight, posterior.dtype)
    sizes = annotations.num_annotators, annotations.num_classes
    return _evidence.counts(posterior, weight, index_of(annotations), annotations.label, *sizes)


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
    Dawid & Skene (1979), and the marginal fine-tuning of Platanios et al. (2020, eq. 9) with a classifier as prior.

    Args:
        log_prior: [B, C], log-probabilities of the true class (`log_softmax` of the logits); -inf is legal.
        confusion: [R, K, C], **observed label outermost**, stored values.
        annotations: B items, R annotators, labels in 0..K-1.
        normalization: as for `crowd_mixture_nll`.
        weight: [nnz], not negative; how often a label counts, default the annotations' own weight.
        reduction: "mean" over annotated items, "sum", or "none" ([B]).

    Returns:
        [] or [B], float32 at least. An item without annotations has 0 and no gradient; one for which every class is
        impossible has inf.

    Raises:
        ValueError: if shapes do not fit, or reduction or normalization are unknown.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is not one of 'mean', 'sum', 'none'")
    loss, nll, *_ = _joint(log_prior, confusion, annotations, normalization, weight, reduction == "mean")
    return nll if reduction == "none" else loss


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
    return _joint(log_prior, confusion, annotations, normalization, weight, False)[2]


def _joint(
    log_prior: Tensor,
    confusion: Tensor,
    annotations: Annotations,
    normalization: Normalization,
    weight: Tensor | None,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kind = normalization_kind(normalization)
    check_confusion(confusion, annotations, 1)
    check_shape("log_prior", log_prior, annotations.num_items, confusion.shape[2], meaning="[num_items, C]")
    confusion, log_prior = promote_beside(confusion, log_prior)
    weight = annotation_weight(annotations, weight, log_prior.dtype)
    arguments = (log_prior, confusion, weight, *index_of(annotations), annotations.label, kind, mean)
    return torch.ops.crowdnal.joint_link(*arguments) if torch.compiler.is_compiling() else JointLink.run(*arguments)
