"""What an ``Annotations`` holds, as one named structure that its helpers take and give."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from crowdnal.data._vocabulary import Vocabulary


class Fields(NamedTuple):
    """The sizes, the tensors in CSR form by item, the ids, and what is computed once and kept (None until then)."""

    num_annotators: int
    num_classes: int
    indptr: Tensor
    annotator: Tensor
    label: Tensor
    weight: Tensor | None = None
    item_id: Tensor | None = None
    vocabulary: Vocabulary | None = None
    item: Tensor | None = None
    order: Tensor | None = None
    plan: Tensor | None = None
    active_annotators: Tensor | None = None
    active_index: Tensor | None = None

    def over(
        self, indptr: Tensor, annotator: Tensor, label: Tensor, weight: Tensor | None, item_id: Tensor | None
    ) -> Fields:
        """The same R, K and ids over other annotations; nothing is cached yet."""
        sizes = self.num_annotators, self.num_classes
        return Fields(*sizes, indptr, annotator, label, weight, item_id, self.vocabulary)

    def map(self, move: Callable[[Tensor], Tensor]) -> Fields:
        """Every tensor moved."""
        return Fields._make(move(value) if isinstance(value, Tensor) else value for value in self)
