"""What votes alone say: proportions of each item's votes, and confusions counted against them."""

from __future__ import annotations

import torch
from torch import Tensor

from crowdnal.data import Annotations
from crowdnal.metrics import empirical_confusion


def vote_proportions(annotations: Annotations, num_classes: int) -> Tensor:
    """``[B, C]`` float64 shares of the (weighted) votes; uniform for an item without any, and for all where C != K."""
    even = torch.full((len(annotations), num_classes), 1 / num_classes, device=annotations.device, dtype=torch.float64)
    if annotations.num_classes != num_classes:
        return even
    votes = annotations.votes().double()
    total = votes.sum(1, keepdim=True)
    return torch.where(total > 0, votes / total.where(total > 0, 1.0), even)


def vote_log_confusion(annotations: Annotations, offset: float) -> Tensor:
    """``log(A + offset)`` ``[R, K, C]`` (K = C), A counted as if an item's mean vote were its true class: a start.

    ``A_r[k, y] = Σ_i Q_i[k] 1[y_ir = y] / Σ_i Q_i[k]`` over the items i that r labelled; uniform without evidence.
    """
    votes = annotations.votes()
    votes = votes / votes.sum(1, keepdim=True).clamp(min=torch.finfo(votes.dtype).tiny)
    return (empirical_confusion(votes, annotations) + offset).log().transpose(1, 2)
