"""Two matrices per annotator, one after the other, as a module like those of :mod:`crowdnal.confusion`."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from typing_extensions import override

from crowdnal.confusion._full import FreeConfusion
from crowdnal.confusion.low_rank import BlockwiseConfusion, LowRankConfusion
from crowdnal.data import Annotations
from crowdnal.functional import Reduction
from crowdnal.functional.reduction import reduction_weights

Hidden = Literal["linear", "softmax"]


class StackedConfusion(BlockwiseConfusion):
    """Scores ``f(p V_r) W_r`` for the softmax link, f the identity or a softmax; V_r ``[C, C]``, W_r ``[C, K]``.

    Both are initialised to the identity. With a ``rank`` both are a diagonal plus a matrix of that rank
    (:class:`LowRankConfusion`), and nothing larger than ``[nnz, C + K]`` is built for the loss.
    """

    first: FreeConfusion | LowRankConfusion
    second: FreeConfusion | LowRankConfusion

    def __init__(
        self, num_annotators: int, num_classes: int, num_labels: int, *,
        hidden: Hidden = "linear", rank: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden: Hidden = hidden
        self._shape = num_annotators, num_classes, num_labels
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

    def nll(self, probs: Tensor, annotations: Annotations, weight: Tensor | None, reduction: Reduction) -> Tensor:
        """Cross-entropy of each label against the softmax of its scores."""
        scores = self._hidden(probs, annotations)
        weight, mean = reduction_weights(annotations, weight, reduction, scores.dtype)
        each: Reduction = "none" if reduction == "none" else "mean" if mean else "sum"
        return self.second.nll(scores, annotations.each_alone(), weight, each)

    def matrices(self, annotators: Tensor | slice) -> Tensor:
        """``[r, C, K]``, detached: the scores of these annotators if the classifier is certain of each class."""
        return self.second.times(self._activate(self.first.matrices(annotators)), annotators)

    def _hidden(self, probs: Tensor, annotations: Annotations) -> Tensor:
        return self._activate(self.first.scores(probs, annotations))

    def _activate(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1) if self.hidden == "softmax" else scores

    @override
    def extra_repr(self) -> str:
        return f"hidden={self.hidden!r}"
