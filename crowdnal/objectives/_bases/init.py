"""Matrices and class prior that training begins with, from the labels alone."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from crowdnal.aggregation import dawid_skene, vote_log_confusion
from crowdnal.data import Annotations

Init = Literal["crowd", "votes", "identity"]
ClassPrior = Literal["crowd", "votes", "uniform"]


def log_confusions(annotations: Annotations, init: Init, offset: float, num_classes: int) -> Tensor:
    """``log(A + offset)`` ``[R, K, C]``, of :func:`crowdnal.dawid_skene` or of the votes (so if K != C)."""
    if init == "crowd" and annotations.num_classes == num_classes:
        return (dawid_skene(annotations).confusion + offset).log().transpose(1, 2)
    return vote_log_confusion(annotations, offset, num_classes)


def log_class_prior(annotations: Annotations, prior: ClassPrior, num_classes: int) -> Tensor:
    """``[C]``: of :func:`crowdnal.dawid_skene`, or of the votes (so if K != C); no class is impossible."""
    if prior == "crowd" and annotations.num_classes == num_classes:
        total = dawid_skene(annotations).posterior[annotations.counts > 0].sum(0)
    else:
        total = annotations.votes()[:, :num_classes].double().sum(0)
    total = total + 1
    return (total / total.sum()).log()
