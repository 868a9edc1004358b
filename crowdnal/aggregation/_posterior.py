"""E-steps: what classifier and annotations together say about the true labels."""

from __future__ import annotations

import torch
from torch import Tensor

from crowdnal.data import Annotations
from crowdnal.functional import crowd_posterior, segment_sum


def posterior(log_probs: Tensor, confusion: Tensor, annotations: Annotations) -> Tensor:
    """Posterior over the true class under the joint link (Dawid & Skene 1979, a classifier as the prior).

    ``posterior_i[k] ∝ p_i[k] · Π_{n in i} A_r[k, y_n]``, in log space and summed in a fixed order, so that
    the result is bitwise repeatable and does not underflow however many annotations an item has.

    Args:
        log_probs: ``[B, C]`` log-probabilities of the classifier. ``-inf`` rules a class out for good.
        confusion: ``[R, C, K]``, row = true class, rows sum to 1. A zero counts as the smallest normal number
            of the dtype: all but impossible, yet annotators that contradict each other never give NaN.
        annotations: B items. A weight multiplies its annotation's log-likelihood.

    Returns:
        ``[B, C]``, rows sum to 1, at least float32. An item without annotations gets its classifier's
        probabilities.
    """
    num_items, num_classes = log_probs.shape
    expected = (annotations.num_annotators, num_classes, annotations.num_classes)
    if num_items != annotations.num_items:
        raise ValueError(
            f"log_probs has {num_items} rows but annotations has {annotations.num_items} items: "
            "give a row for every item"
        )
    if tuple(confusion.shape) != expected:
        raise ValueError(
            f"confusion has shape {tuple(confusion.shape)} but must be [R, C, K] = {expected}: rows are true classes"
        )
    dtype = torch.promote_types(torch.promote_types(log_probs.dtype, confusion.dtype), torch.float32)
    log_confusion = confusion.transpose(1, 2).to(dtype).clamp(min=torch.finfo(dtype).tiny).log()
    return crowd_posterior(log_probs.to(dtype), log_confusion, annotations, normalization="none")


def posterior_of_log_likelihood(log_probs: Tensor, log_likelihood: Tensor, annotations: Annotations) -> Tensor:
    """:func:`posterior` where matrices of all annotators would not fit: the log-likelihood of each label instead.

    Args:
        log_probs: ``[B, C]``.
        log_likelihood: ``[nnz, C]``, log-probability of each observed label under each true class.
        annotations: B items; weights multiply the log-likelihood.
    """
    if annotations.weight is not None:
        log_likelihood = log_likelihood * annotations.weight.to(log_likelihood.dtype).unsqueeze(1)
    return (log_probs + segment_sum(log_likelihood, annotations)).softmax(-1)
