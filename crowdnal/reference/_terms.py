"""What the links share: reductions, and the derivative of a reduced loss for each term."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What is computed with values stored in `dtype`: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def widen(stored: Tensor) -> Tensor:
    """Stored values in the dtype that is computed with."""
    return stored.to(compute_dtype(stored.dtype))


def new_empty(stored: Tensor, *sizes: int) -> Tensor:
    """Of the dtype that is computed with."""
    return stored.new_empty(sizes, dtype=compute_dtype(stored.dtype))


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
