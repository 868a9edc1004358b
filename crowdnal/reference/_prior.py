"""The Dirichlet prior of the rows of annotators' matrices: what it adds to a loss, in plain PyTorch.

An annotation n of r adds u_n / max(labels_given_r, 1) times the distance of the rows of r from the mean of the prior,
u_n what its nll counts in the loss: over an epoch, which meets each label once, an annotator adds the distance once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crowdnal.reference._terms import widen


def softmax_rows(confusion: Tensor, common: Tensor | None) -> Tensor:
    """Logarithms of the rows [R, C, K] that matrices of the softmax link show, of what is `common` [C, K] too."""
    confusion = widen(confusion)
    return (confusion if common is None else confusion + common).log_softmax(2)


def softmax_rows_vjp(confusion: Tensor, common: Tensor | None, grad: Tensor) -> Tensor:
    """Gradient for the matrices from `grad` [R, C, K] for `softmax_rows`."""
    return grad - softmax_rows(confusion, common).exp() * grad.sum(2, keepdim=True)


def common_scores(scores: Tensor, common: Tensor) -> Tensor:
    """log(scores exp(common)) [B, K], for probabilities [B, C]: of labels that come from what is `common` to all."""
    return (scores @ common.exp()).log()


def common_scores_vjp(scores: Tensor, common: Tensor, grad: Tensor) -> Tensor:
    """Gradient for the scores from `grad` [B, K] for `common_scores`."""
    chances = common.exp()
    return (grad / (scores @ chances)) @ chances.t()


def prior_distance(log_rows: Tensor, prior: Tensor, dim: int) -> Tensor:
    """[R]: sum of prior (log mean - log_rows), log_rows [R, *, *], prior [*, *] with its distributions along `dim`."""
    total = prior.sum(dim, keepdim=True)
    mean = prior / torch.where(total > 0, total, 1.0)
    return (torch.special.xlogy(prior, mean) - prior * log_rows).sum((1, 2))
