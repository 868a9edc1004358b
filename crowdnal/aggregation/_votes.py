"""What votes alone say: proportions of each item's votes, and confusions counted against them."""

from __future__ import annotations

import torch
from torch import Tensor

from crowdnal._utils.probability import proportions
from crowdnal.data import Annotations
from crowdnal.metrics import empirical_confusion


def vote_proportions(annotations: Annotations, num_classes: int) -> Tensor:
    """``[B, C]`` float64 of the (weighted) votes; uniform for an item without any, and for all where C != K.

    Raises:
        ValueError: the sum of an item's weights overflows.
    """
    if annotations.num_classes != num_classes:
        return proportions(torch.zeros(len(annotations), num_classes, device=annotations.device).double(), 1)
    votes = annotations.votes().double()
    if annotations.weight is not None and not bool(votes.isfinite().all()):
        i = int((~votes.isfinite()).nonzero()[0, 0])
        raise ValueError(
            f"the weights of item {i} add up to more than {annotations.weight.dtype} holds: divide all weights by one "
            "number"
        )
    return proportions(votes, 1)


def vote_log_confusion(annotations: Annotations, offset: float, num_classes: int) -> Tensor:
    """``log(A + offset)`` ``[R, K, C]`` (K >= C), A counted as if an item's mean vote were its true class: an init.

    ``A_r[k, y] = Σ_i Q_i[k] 1[y_ir = y] / Σ_i Q_i[k]`` over the items i that r labelled; uniform without evidence.
    Labels behind the classes are no votes.
    """
    votes = proportions(annotations.votes()[:, :num_classes], 1)
    return (empirical_confusion(votes, annotations) + offset).log().transpose(1, 2)
