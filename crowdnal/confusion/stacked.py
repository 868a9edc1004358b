"""Two matrices per annotator, one after the other, as a module like those of :mod:`crowdnal.confusion`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from crowdnal._utils.distributed import assign
from crowdnal.confusion._full import FreeConfusion
from crowdnal.confusion.low_rank import BlockwiseConfusion, LowRankConfusion
from crowdnal.data import Annotations
from crowdnal.functional import Reduction
from crowdnal.functional.reduction import reduction_weights
from crowdnal.functional.segments import gather_rows

Hidden = Literal["linear", "softmax"]


class StackedConfusion(BlockwiseConfusion):
    """Scores ``f(p V_r) W_r`` for the softmax link, f the identity or a softmax; V_r ``[C, C]``, W_r ``[C, K]``.

    Both are initialised to the identity. With a ``rank`` both are a diagonal plus a matrix of that rank
    (:class:`LowRankConfusion`), and nothing larger than ``[nnz, C + K]`` is built for the loss. ``common``, of full
    matrices, is that of :class:`crowdnal.confusion.FreeConfusion`.
    """

    common: Tensor | None
    first: FreeConfusion | LowRankConfusion
    second: FreeConfusion | LowRankConfusion

    def __init__(
        self, num_annotators: int, num_classes: int, num_labels: int, *,
        hidden: Hidden = "linear", rank: int | None = None, common: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden: Hidden = hidden
        self._shape = num_annotators, num_classes, num_labels
        self.register_buffer("common", torch.zeros(num_classes, num_labels) if common else None)
        if rank is None:
            self.first = FreeConfusion(num_annotators, num_classes, num_classes)
            self.second = FreeConfusion(num_annotators, num_classes, num_labels)
        else:
            # two random factors of deviation 1 / √rank in a row often lead to classes exchanged, for good
            self.first = LowRankConfusion(num_annotators, num_classes, num_classes, rank=rank, spread=0.1)
            self.second = LowRankConfusion(num_annotators, num_classes, num_labels, rank=rank, spread=0.1)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(R, C, K)."""
        return self._shape

    def scores(self, probs: Tensor, annotations: Annotations) -> Tensor:
        """Scores of the observed labels ``[nnz, K]`` given ``probs [B, C]``; nothing larger is built."""
        return self.second.scores(self._hidden(probs, annotations), annotations.each_alone())

    def nll(
        self, probs: Tensor, annotations: Annotations, weight: Tensor | None, reduction: Reduction, *,
        shared: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Cross-entropy of each label against the softmax of its scores, plus those of its item ``shared [B, K]``."""
        scores = self._hidden(probs, annotations)
        weight, mean = reduction_weights(annotations, weight, reduction, scores.dtype)
        each: Reduction = "none" if reduction == "none" else "mean" if mean else "sum"
        if shared is not None:
            shared = gather_rows(shared, annotations.item, torch.arange(len(scores), device=scores.device))
        return self.second.nll(scores, annotations.each_alone(), weight, each, shared=shared)

    @torch.no_grad()
    def begin(self, log_crowd: Tensor) -> None:
        """Everyone is like the crowd ``[C, K]``, as logarithms: their second matrix adds nothing to it."""
        assert self.common is not None and isinstance(self.second, FreeConfusion)
        self.common.copy_(log_crowd)
        assign(self.second.weight, torch.zeros_like(self.second.weight))

    def log_rows(self, annotators: Tensor) -> Tensor:
        """As `crowdnal.confusion.FreeConfusion.log_rows`."""
        assert isinstance(self.first, FreeConfusion) and isinstance(self.second, FreeConfusion)
        dtype = torch.promote_types(self.first.weight.dtype, torch.float32)
        first, second = (part.weight[annotators].to(dtype) for part in (self.first, self.second))
        return self._with_common(self._activate(first) @ second).log_softmax(-1)

    def matrices(self, annotators: Tensor | slice) -> Tensor:
        """``[r, C, K]``, detached: the scores of these annotators if the classifier is certain of each class."""
        return self._with_common(self.second.times(self._activate(self.first.matrices(annotators)), annotators))

    def _with_common(self, scores: Tensor) -> Tensor:
        return scores if self.common is None else scores + self.common.to(scores.dtype)

    def _hidden(self, probs: Tensor, annotations: Annotations) -> Tensor:
        return self._activate(self.first.scores(probs, annotations))

    def _activate(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1) if self.hidden == "softmax" else scores

    @override
    def extra_repr(self) -> str:
        return f"hidden={self.hidden!r}"
