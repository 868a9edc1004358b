"""The losses and primitives on `Annotations`, differentiable to any order, native where the library was built."""

from __future__ import annotations

import torch
from torch import Tensor

from crowdnal.annotations import Annotations
from crowdnal.functional import mix as _mix
from crowdnal.functional._common import (
    HALF,
    Normalization,
    check_confusion,
    check_shape,
    index_of,
    normalization_kind,
    promote,
    promote_beside,
)
from crowdnal.functional._reduction import Reduction, reduction_weights
from crowdnal.functional._sparse import compact
from crowdnal.functional.joint import crowd_marginal_nll, crowd_posterior, evidence, label_counts
from crowdnal.functional.mixture_link import MixtureLink
from crowdnal.functional.pair_confusion import PairConfusion
from crowdnal.functional.softmax_link import SoftmaxLink

__all__ = [
    "Normalization",
    "Reduction",
    "crowd_cross_entropy",
    "crowd_marginal_nll",
    "crowd_mixture_nll",
    "crowd_posterior",
    "evidence",
    "label_counts",
    "mix",
    "mix_annotators",
    "mix_items",
    "pair_confusion",
    "segment_sum",
]


def mix(scores: Tensor, confusion: Tensor, annotations: Annotations) -> Tensor:
    """Scores of every annotation's item through its annotator's matrix: h_n = scores_i W_r.

    Args:
        scores: [B, C], one row an item.
        confusion: [R, C, K], one matrix an annotator; read as by `crowd_cross_entropy`.
        annotations: B items, R annotators.

    Returns:
        [nnz, K], one row an annotation.

    Raises:
        ValueError: if the shapes do not fit.
    """
    check_confusion(confusion, annotations, 2)
    check_shape("scores", scores, annotations.num_items, confusion.shape[1], meaning="[num_items, C]")
    confusion, scores = promote_beside(confusion, scores)
    return _mix.mix(scores, confusion, index_of(annotations))


def mix_items(grad: Tensor, confusion: Tensor, annotations: Annotations) -> Tensor:
    """Adjoint of `mix` for scores: out_i = sum over annotations n of item i of W_r grad_n.

    Args:
        grad: [nnz, K], one row an annotation.
        confusion: [R, C, K].
        annotations: B items, R annotators.

    Returns:
        [B, C].

    Raises:
        ValueError: if the shapes do not fit.
    """
    check_confusion(confusion, annotations, 2)
    check_shape(
        "grad",
        grad,
        annotations.num_annotations,
        confusion.shape[2],
        meaning="[num_annotations, num_classes]",
    )
    confusion, grad = promote_beside(confusion, grad)
    return _mix.mix_items(grad, confusion, index_of(annotations))


def mix_annotators(scores: Tensor, grad: Tensor, annotations: Annotations) -> Tensor:
    """Adjoint of `mix` for confusion: out_r = sum over annotations n of annotator r of scores_i grad_n^T.

    Args:
        scores: [B, C], one row an item.
        grad: [nnz, K], one row an annotation.
        annotations: B items, R annotators.

    Returns:
        [R, C, K].

    Raises:
        ValueError: if the shapes do not fit.
    """
    if scores.dim() != 2 or grad.dim() != 2:
        raise ValueError(f"scores and grad must be matrices, got {tuple(scores.shape)} and {tuple(grad.shape)}")
    check_shape("scores", scores, annotations.num_items, scores.shape[1], meaning="[num_items, C]")
    check_shape("grad", grad, annotations.num_annotations, grad.shape[1], meaning="[num_annotations, K]")
    scores, grad = promote(scores, grad)
    return _mix.mix_annotators(scores, grad, index_of(annotations), annotations.num_annotators)


def segment_sum(values: Tensor, annotations: Annotations) -> Tensor:
    """Sum of values [nnz, D] over each item's annotations: [B, D], in a fixed order."""
    if values.dim() != 2 or values.shape[0] != annotations.num_annotations:
        raise ValueError(f"values has shape {tuple(values.shape)}, expected [{annotations.num_annotations}, D]")
    (values,) = promote(values)
    return _mix.sum_by_item(values, index_of(annotations))


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
        reduction: "mean" over annotations (weighted: sum(w l) / sum(w)), "sum", "none" ([nnz], times weight), or
            "item_mean" (mean over the annotated items of each one's weighted mean).
        sparse_grad: the gradient of confusion is a sparse tensor of the matrices that the batch touched, so that time
            and memory of a step do not depend on R; for `torch.optim.SparseAdam` or SGD. Not under `torch.compile`.

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
    confusion, index = compact(confusion, annotations) if sparse_grad else (confusion, index_of(annotations))
    confusion, scores, shared, mixing = promote_beside(confusion, scores, shared, mixing)
    weight, mean = reduction_weights(annotations, weight, reduction, scores.dtype)
    each = reduction == "none"
    arguments = (
        scores,
        confusion,
        shared,
        mixing,
        None if each else weight,
        *index,
        annotations.label,
        mean,
    )
    compiling = torch.compiler.is_compiling()
    loss, nll, _ = torch.ops.crowdnal.softmax_link(*arguments) if compiling else SoftmaxLink.run(*arguments)
    return (nll if weight is None else nll * weight) if each else loss


def crowd_mixture_nll(
    log_probs: Tensor,
    confusion: Tensor,
    annotations: Annotations,
    *,
    normalization: Normalization = "softmax",
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    sparse_grad: bool = False,
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

    Returns:
        [] or [nnz], float32 at least. Without annotations: 0, with zero gradients.

    Raises:
        ValueError: if shapes do not fit, or reduction or normalization are unknown.
    """
    kind = normalization_kind(normalization)
    check_confusion(confusion, annotations, 1)
    check_shape("log_probs", log_probs, annotations.num_items, confusion.shape[2], meaning="[num_items, C]")
    confusion, index = compact(confusion, annotations) if sparse_grad else (confusion, index_of(annotations))
    confusion, log_probs = promote_beside(confusion, log_probs)
    weight, mean = reduction_weights(annotations, weight, reduction, log_probs.dtype)
    each = reduction == "none"
    arguments = (
        log_probs,
        confusion,
        None if each else weight,
        *index,
        annotations.label,
        kind,
        mean,
    )
    compiling = torch.compiler.is_compiling()
    loss, nll, *_ = torch.ops.crowdnal.mixture_link(*arguments) if compiling else MixtureLink.run(*arguments)
    return (nll if weight is None else nll * weight) if each else loss


def pair_confusion(difficulty: Tensor, competence: Tensor, annotations: Annotations) -> Tensor:
    """Log-probability of every observed label under each true class, from the confusion of the pair that made it.

    The confusion of LIA (Platanios et al. 2020), an inner product over latents of two positive tensors:
    log_q[n, k] = log Q_n[k, y_n] with Q_n[k, :] = softmax over j of logsumexp_l (difficulty_i + competence_r)[k, j, l].
    Both objectives follow from it:

        log_joint = log_h + segment_sum(pair_confusion(difficulty, competence, annotations), annotations)  # [B, C]
        m_step = -(posterior * log_joint).sum()  # sum_i posterior_i . (log h_i + sum_r log Q[:, y_r])
        marginal = -log_joint.logsumexp(1).sum()  # with softmax(log_joint) as the next posterior

    Args:
        difficulty: [B, C, K, L], one tensor an item `[true, observed, latent]`; any value, -infinity is impossible.
        competence: [R, C, K, L], one an annotator. Both in float16 or both in bfloat16 are read as they are stored.
        annotations: B items, R annotators, labels in 0..K-1.

    Returns:
        [nnz, C], at most 0, float32 at least; -infinity where the label, or every label of a class, is impossible
        (it passes no gradient to what is impossible). The second derivative works in plain PyTorch on blocks of
        annotations.

    Raises:
        ValueError: if the shapes do not fit.
    """
    if competence.dim() != 4 or competence.shape[0] != annotations.num_annotators:
        raise ValueError(
            f"competence has shape {tuple(competence.shape)}, expected [num_annotators, C, num_classes, L] with "
            f"num_annotators={annotations.num_annotators}: one tensor an annotator is needed"
        )
    _, classes, labels, latents = competence.shape
    if labels != annotations.num_classes or min(classes, labels, latents) == 0:
        raise ValueError(
            f"competence has shape {tuple(competence.shape)}, expected [num_annotators, C, num_classes, L] with "
            f"num_classes={annotations.num_classes} observed labels and C, num_classes and L at least 1"
        )
    sizes = annotations.num_items, classes, labels, latents
    check_shape("difficulty", difficulty, *sizes, meaning="[num_items, C, num_classes, L]")
    if difficulty.dtype != competence.dtype or competence.dtype not in HALF:
        difficulty, competence = promote(difficulty, competence)
    arguments = (difficulty, competence, *index_of(annotations), annotations.label)
    compiling = torch.compiler.is_compiling()
    return (torch.ops.crowdnal.pair_confusion(*arguments) if compiling else PairConfusion.run(*arguments))[0]
