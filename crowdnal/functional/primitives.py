"""The primitives and sufficient statistics on `Annotations`, differentiable to any order."""

from __future__ import annotations

from torch import Tensor

from crowdnal.data import Annotations
from crowdnal.functional._autograd import label_log_likelihood as _statistics
from crowdnal.functional._autograd import mix as _mix
from crowdnal.functional._autograd._function import (
    HALF,
    check_confusion,
    check_dense,
    check_shape,
    index_of,
    promote,
    promote_beside,
)
from crowdnal.functional._autograd.pair_confusion import PairConfusion
from crowdnal.functional.segments import annotation_weight, sum_by_item
from crowdnal.ops import OPS
from crowdnal.reference import NONE, compute_dtype

__all__ = [
    "em_step",
    "label_counts",
    "label_log_likelihood",
    "mix",
    "mix_annotators",
    "mix_items",
    "mixture_step",
    "pair_confusion",
    "segment_sum",
]

_pair_confusion = PairConfusion.op


def mix(scores: Tensor, confusion: Tensor, annotations: Annotations) -> Tensor:
    """Scores of every annotation's item through its annotator's matrix: h_n = scores_i W_r.

    Args:
        scores: [B, C], one row per item.
        confusion: [R, C, K], one matrix per annotator; read as by `crowd_cross_entropy`.
        annotations: B items, R annotators.

    Returns:
        [nnz, K], one row per annotation.

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
        grad: [nnz, K], one row per annotation.
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
        scores: [B, C], one row per item.
        grad: [nnz, K], one row per annotation.
        annotations: B items, R annotators.

    Returns:
        [R, C, K].

    Raises:
        ValueError: if the shapes do not fit.
    """
    check_dense("scores", scores)
    check_dense("grad", grad)
    if scores.dim() != 2 or grad.dim() != 2:
        raise ValueError(f"scores and grad must be matrices, got {tuple(scores.shape)} and {tuple(grad.shape)}")
    check_shape("scores", scores, annotations.num_items, scores.shape[1], meaning="[num_items, C]")
    check_shape("grad", grad, annotations.num_annotations, grad.shape[1], meaning="[num_annotations, K]")
    scores, grad = promote(scores, grad)
    return _mix.mix_annotators(scores, grad, index_of(annotations), annotations.num_annotators)


def segment_sum(values: Tensor, annotations: Annotations) -> Tensor:
    """Sum of values [nnz, D] over each item's annotations: [B, D], in a fixed order."""
    check_dense("values", values)
    if values.dim() != 2 or values.shape[0] != annotations.num_annotations:
        raise ValueError(f"values has shape {tuple(values.shape)}, expected [{annotations.num_annotations}, D]")
    (values,) = promote(values)
    return sum_by_item(values, index_of(annotations))


def label_log_likelihood(log_confusion: Tensor, annotations: Annotations, *, weight: Tensor | None = None) -> Tensor:
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
    return _statistics.label_log_likelihood(log_confusion, weight, index_of(annotations), annotations.label)


def label_counts(posterior: Tensor, annotations: Annotations, *, weight: Tensor | None = None) -> Tensor:
    """Expected number of times annotator r gave label y to items of class k; the adjoint of `label_log_likelihood`.

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
    check_dense("posterior", posterior)
    if posterior.dim() != 2 or posterior.shape[0] != annotations.num_items:
        raise ValueError(
            f"posterior has shape {tuple(posterior.shape)}, expected [num_items, C] = ({annotations.num_items}, C)"
        )
    (posterior,) = promote(posterior)
    weight = annotation_weight(annotations, weight, posterior.dtype)
    sizes = annotations.num_annotators, annotations.num_classes
    return _statistics.label_counts(posterior, weight, index_of(annotations), annotations.label, *sizes)


def pair_confusion(difficulty: Tensor, competence: Tensor, annotations: Annotations) -> Tensor:
    """Log-probability of every observed label under each true class, from the confusion of the pair that made it.

    The confusion of LIA (Platanios et al. 2020), an inner product over latents of two positive tensors:
    log_q[n, k] = log Q_n[k, y_n] with Q_n[k, :] = softmax over j of logsumexp_l (difficulty_i + competence_r)[k, j, l].
    Both objectives follow from it:

        log_joint = log_h + segment_sum(pair_confusion(difficulty, competence, annotations), annotations)  # [B, C]
        m_step = -(posterior * log_joint).sum()  # sum_i posterior_i . (log h_i + sum_r log Q[:, y_r])
        marginal = -log_joint.logsumexp(1).sum()  # with softmax(log_joint) as the next posterior

    Args:
        difficulty: [B, C, K, L], one tensor per item `[true, observed, latent]`; any value, -infinity is impossible.
        competence: [R, C, K, L], one per annotator. Both in float16 or both in bfloat16 are read as they are stored.
        annotations: B items, R annotators, labels in 0..K-1.

    Returns:
        [nnz, C], at most 0, float32 at least; -infinity where the label, or every label of a class, is impossible
        (it passes no gradient to what is impossible). The second derivative works in plain PyTorch on blocks of
        annotations.

    Raises:
        ValueError: if the shapes do not fit.
    """
    check_dense("competence", competence)
    if competence.dim() != 4 or competence.shape[0] != annotations.num_annotators:
        raise ValueError(
            f"competence has shape {tuple(competence.shape)}, expected [num_annotators, C, num_classes, L] with "
            f"num_annotators={annotations.num_annotators}: one tensor per annotator is needed"
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
    log_q, _ = _pair_confusion(difficulty, competence, *index_of(annotations), annotations.label)
    return log_q


def em_step(
    log_prior: Tensor | None, log_confusion: Tensor, weight: Tensor | None, annotations: Annotations
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`crowdnal.reference.em_step`; annotations on a GPU are sorted once, those on the CPU need not be."""
    a = annotations
    order = a.order if a.annotator.is_cuda else None
    return OPS["em_step"](log_prior, log_confusion, weight, a.indptr, a.annotator, order, a.label)


def mixture_step(log_probs: Tensor, log_confusion: Tensor, annotations: Annotations) -> tuple[Tensor, Tensor]:
    """E-step of the mixture link: each label's -log sum_k p_i[k] A_r[k, y] [nnz] and its class posterior [nnz, C].

    Without gradients. log_confusion [R, K, C] holds log A, **observed label outermost**, in the dtype of log_probs.
    """
    arguments = (log_probs, log_confusion.contiguous(), None, *index_of(annotations), annotations.label)
    _, nll, posterior, _ = OPS["mixture_link"](*arguments, NONE, False)
    return nll, posterior
