"""Every op in plain PyTorch: the definition, the fallback without the native library, the oracle of the tests.

Same names, arguments and results as the ops in `crowdnal.ops`. Shapes: scores [B, C], confusion [R, C, K],
log_probs [B, C], an observed-label-major confusion [R, K, C], indptr [B + 1], item, annotator, order and label [nnz].
Differentiable by autograd; `mix` gathers nnz x C x K, which the native kernels never build.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

NONE, SOFTMAX, SOFTPLUS = 0, 1, 2
"""How a stored confusion becomes log-probabilities over the observed labels (`normalization` of the ops)."""

SOFTPLUS_TAIL = -20.0


def mix(scores: Tensor, confusion: Tensor, indptr: Tensor, item: Tensor, annotator: Tensor, order: Tensor) -> Tensor:
    """h[n, k] = sum_c scores[item_n, c] confusion[annotator_n, c, k]; returns [nnz, K]."""
    return torch.einsum("nc,nck->nk", scores[item], confusion[annotator])


def mix_items(
    grad: Tensor, confusion: Tensor, indptr: Tensor, item: Tensor, annotator: Tensor, order: Tensor
) -> Tensor:
    """out[i, c] = sum over annotations n of item i of sum_k grad[n, k] confusion[annotator_n, c, k]; returns [B, C]."""
    rows = torch.einsum("nk,nck->nc", grad, confusion[annotator])
    return rows.new_zeros(indptr.shape[0] - 1, confusion.shape[1]).index_add(0, item, rows)


def mix_annotators(
    scores: Tensor,
    grad: Tensor,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    num_annotators: int,
) -> Tensor:
    """out[r, c, k] = sum over annotations n of annotator r of scores[item_n, c] grad[n, k]; returns [R, C, K]."""
    outer = torch.einsum("nc,nk->nck", scores[item], grad)
    return outer.new_zeros(num_annotators, scores.shape[1], grad.shape[1]).index_add(0, annotator, outer)


def reduce(nll: Tensor, weight: Tensor | None, mean: bool) -> Tensor:
    """sum of weight x nll [nnz], divided by nnz if `mean`; 0 where nothing was annotated."""
    total = (nll if weight is None else nll * weight).sum()
    return total / max(nll.shape[0], 1) if mean else total


def upstream(
    grad_loss: Tensor | None, grad_nll: Tensor | None, weight: Tensor | None, like: Tensor, mean: bool
) -> Tensor:
    """d output / d nll [nnz] when `loss` and `nll` are both used; `like` is any [nnz, ...] tensor."""
    out = like.new_zeros(like.shape[0])
    if grad_loss is not None:
        scale = grad_loss / max(like.shape[0], 1) if mean else grad_loss
        out = out + (scale if weight is None else scale * weight)
    return out if grad_nll is None else out + grad_nll


def residual(probs: Tensor, label: Tensor) -> Tensor:
    """d nll / d h = softmax(h) - onehot(label), [nnz, K]."""
    return probs - (label.unsqueeze(1) == torch.arange(probs.shape[1], device=probs.device)).to(probs.dtype)


def cross_entropy(h: Tensor, weight: Tensor | None, label: Tensor, mean: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [], nll [nnz], probs [nnz, K]) of scores h [nnz, K]."""
    log_probs = F.log_softmax(h, dim=1)
    nll = -log_probs.gather(1, label.unsqueeze(1)).squeeze(1)
    return reduce(nll, weight, mean), nll, log_probs.exp()


def softmax_link(
    scores: Tensor,
    confusion: Tensor,
    shared: Tensor | None,
    weight: Tensor | None,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    label: Tensor,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of softmax(scores_i W_r + shared_i).

    Returns:
        loss [] = sum of weight x nll (divided by nnz if `mean`), nll [nnz], probs [nnz, K] (not differentiable).
    """
    h = mix(scores, confusion, indptr, item, annotator, order)
    return cross_entropy(h if shared is None else h + shared[item], weight, label, mean)


def softmax_link_backward(
    grad_loss: Tensor | None,
    grad_nll: Tensor | None,
    scores: Tensor,
    confusion: Tensor,
    shared: Tensor | None,
    weight: Tensor | None,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    label: Tensor,
    probs: Tensor,
    mean: bool,
    need_scores: bool,
    need_confusion: bool,
    need_shared: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `softmax_link` for scores, confusion and shared; what is not needed has 0 rows."""
    index = (indptr, item, annotator, order)
    g = upstream(grad_loss, grad_nll, weight, probs, mean).unsqueeze(1) * residual(probs, label)
    dscores, dconfusion = scores.new_zeros(0, scores.shape[1]), confusion.new_zeros(0, *confusion.shape[1:])
    dshared = g.new_zeros(indptr.shape[0] - 1 if need_shared else 0, g.shape[1])
    if need_scores:
        dscores = mix_items(g, confusion, *index)
    if need_confusion:
        dconfusion = mix_annotators(scores, g, *index, confusion.shape[0])
    if need_shared:
        dshared = dshared.index_add(0, item, g)
    return dscores, dconfusion, dshared


def activation(confusion: Tensor, normalization: int) -> Tensor:
    """Unnormalised log-probabilities of a stored confusion: itself, or log softplus of it (finite in the tail)."""
    if normalization != SOFTPLUS:
        return confusion
    tail = confusion < SOFTPLUS_TAIL
    body = torch.where(tail, torch.zeros_like(confusion), confusion)
    low = torch.where(tail, confusion, torch.full_like(confusion, SOFTPLUS_TAIL))
    return torch.where(tail, low - 0.5 * low.exp(), F.softplus(body).log())


def log_confusion(confusion: Tensor, normalization: int) -> Tensor:
    """log A [R, K, C] of a stored confusion [R, K, C]: each column sums to 1 over the observed labels (dim 1)."""
    return confusion if normalization == NONE else F.log_softmax(activation(confusion, normalization), dim=1)


def mixture_link(
    log_probs: Tensor,
    confusion: Tensor,
    weight: Tensor | None,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    label: Tensor,
    normalization: int,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Negative log-likelihood -log sum_k p_i[k] A_r[y_n, k], in log space.

    Returns:
        loss [] = sum of weight x nll (divided by nnz if `mean`), nll [nnz], posterior [nnz, C] (not differentiable).
    """
    return log_sum(log_probs[item] + log_confusion(confusion, normalization)[annotator, label], weight, mean)


def log_sum(t: Tensor, weight: Tensor | None, mean: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [], nll [nnz], posterior [nnz, C]) of the log joint t [nnz, C] of true class and observed label."""
    nll = -t.logsumexp(dim=1)
    return reduce(nll, weight, mean), nll, torch.softmax(t, dim=1).nan_to_num(0.0)


def mixture_link_backward(
    grad_loss: Tensor | None,
    grad_nll: Tensor | None,
    log_probs: Tensor,
    confusion: Tensor,
    weight: Tensor | None,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    label: Tensor,
    posterior: Tensor,
    normalization: int,
    mean: bool,
    need_log_probs: bool,
    need_confusion: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of `mixture_link` for log_probs and confusion; what is not needed has 0 rows."""
    dt = -upstream(grad_loss, grad_nll, weight, posterior, mean).unsqueeze(1) * posterior
    num_items = indptr.shape[0] - 1 if need_log_probs else 0
    dlog_probs = dt.new_zeros(num_items, dt.shape[1])
    if need_log_probs:
        dlog_probs = dlog_probs.index_add(0, item, dt)
    if not need_confusion:
        return dlog_probs, confusion.new_zeros(0, *confusion.shape[1:])
    rows = dt.new_zeros(confusion.shape[0] * confusion.shape[1], confusion.shape[2])
    grad = rows.index_add(0, annotator * confusion.shape[1] + label, dt).reshape(confusion.shape)
    return dlog_probs, log_confusion_vjp(confusion, grad, normalization)


def activation_grad(confusion: Tensor, normalization: int) -> Tensor:
    """d activation / d confusion, elementwise: 1, or sigmoid(x) / softplus(x)."""
    if normalization != SOFTPLUS:
        return torch.ones_like(confusion)
    return (F.logsigmoid(confusion) - activation(confusion, SOFTPLUS)).exp()


def log_confusion_vjp(confusion: Tensor, grad: Tensor, normalization: int) -> Tensor:
    """Gradient for the stored confusion from `grad` [R, K, C] for log A."""
    if normalization == NONE:
        return grad
    probability = log_confusion(confusion, normalization).exp()
    return activation_grad(confusion, normalization) * (grad - probability * grad.sum(1, keepdim=True))
