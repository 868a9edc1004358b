"""How a stored confusion becomes log-probabilities over the observed labels, and the derivatives of that."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from crowdnal.reference._terms import widen

NONE, SOFTMAX, SOFTPLUS = 0, 1, 2
"""`normalization` of the ops."""

SOFTPLUS_TAIL = -20.0


def activation(confusion: Tensor, normalization: int) -> Tensor:
    """Unnormalised log-probabilities of a stored confusion: itself, or log softplus of it (finite in the tail)."""
    confusion = widen(confusion)
    if normalization != SOFTPLUS:
        return confusion
    tail = confusion < SOFTPLUS_TAIL
    body = torch.where(tail, torch.zeros_like(confusion), confusion)
    low = torch.where(tail, confusion, torch.full_like(confusion, SOFTPLUS_TAIL))
    return torch.where(tail, low - 0.5 * low.exp(), F.softplus(body).log())


def activation_grad(confusion: Tensor, normalization: int) -> Tensor:
    """d activation / d confusion, elementwise: 1, or sigmoid(x) / softplus(x)."""
    confusion = widen(confusion)
    if normalization != SOFTPLUS:
        return torch.ones_like(confusion)
    return (F.logsigmoid(confusion) - activation(confusion, SOFTPLUS)).exp()


def log_confusion(confusion: Tensor, normalization: int) -> Tensor:
    """log A [R, K, C] of a stored confusion [R, K, C]: each column sums to 1 over the observed labels (dim 1)."""
    stored = activation(confusion, normalization)
    return stored if normalization == NONE else F.log_softmax(stored, dim=1)


def log_confusion_vjp(confusion: Tensor, grad: Tensor, normalization: int) -> Tensor:
    """Gradient for the stored confusion from `grad` [R, K, C] for log A."""
    if normalization == NONE:
        return grad
    probability = log_confusion(confusion, normalization).exp()
    return activation_grad(confusion, normalization) * (grad - probability * grad.sum(1, keepdim=True))


def log_confusion_jvp(confusion: Tensor, tangent: Tensor, normalization: int) -> Tensor:
    """Change of log A [R, K, C] when the stored confusion changes by `tangent`."""
    if normalization == NONE:
        return widen(tangent)
    tangent = activation_grad(confusion, normalization) * tangent
    return tangent - (log_confusion(confusion, normalization).exp() * tangent).sum(1, keepdim=True)


def log_confusion_vjp_jvp(confusion: Tensor, grad: Tensor, tangent: Tensor, normalization: int) -> Tensor:
    """Change of `log_confusion_vjp` at a fixed `grad` when the stored confusion changes by `tangent`."""
    confusion = widen(confusion)
    if normalization == NONE:
        return confusion.new_zeros(confusion.shape)
    column = grad.sum(1, keepdim=True)
    probability = log_confusion(confusion, normalization).exp()
    slope = activation_grad(confusion, normalization)
    out = -slope * column * probability * log_confusion_jvp(confusion, tangent, normalization)
    if normalization == SOFTPLUS:  # slope' = slope (1 - sigmoid - slope)
        bend = slope * (1 - torch.sigmoid(confusion) - slope)
        out = out + (grad - probability * column) * bend * tangent
    return out
