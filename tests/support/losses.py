"""The losses as functions of scores [B, C] and confusion [R, C, K], for the tests of what all of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import crowdnal.functional as F
from support.problems import Problem


def losses(p: Problem, reduction: str, weight: Tensor | None = None, cast: Any = None) -> list[Callable[..., Tensor]]:
    a = p.annotations

    def softmax(z: Tensor, w: Tensor) -> Tensor:
        return F.crowd_cross_entropy(z, w, a, weight=weight, reduction=reduction)  # type: ignore[arg-type]

    def mixture(z: Tensor, w: Tensor) -> Tensor:
        return F.crowd_mixture_nll(
            z.log_softmax(1, dtype=torch.promote_types(z.dtype, torch.float32)),
            w.transpose(1, 2),
            a,
            normalization="softplus",
            weight=weight,
            reduction=reduction,  # type: ignore[arg-type]
        )

    return [softmax, mixture]
