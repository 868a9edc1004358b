"""Aggregate first, then train: by any method of :mod:`crowdnal.aggregation`; DL-GLAD of Chu et al. 2021 for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from crowdnal.aggregation import aggregate, check_method
from crowdnal.data import Annotations
from crowdnal.functional import Reduction, label_counts
from crowdnal.objectives._bases.counted import CountedObjective
from crowdnal.objectives._bases.targets import most_probable


class DLAggregate(CountedObjective):
    """Cross-entropy against the posteriors that an aggregation method finds in the annotations, once, at the start.

    Not a model of its own: what the classifier learns does not come back to the annotators. The confusions shown are
    counted against the posteriors. Needs ``on_train_start(annotations)``.

    Args:
        method: of :func:`crowdnal.aggregate`.
        method_options: its options.
        soft: train on the posteriors; otherwise on their most probable class (the first of equals).
        smoothing: pseudo-count added to every cell of every confusion shown; the method has its own.
    """

    name: ClassVar[str] = "dl-aggregate"

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        num_labels: int | None = None,
        reduction: Reduction = "mean",
        method: str = "dawid-skene",
        method_options: Mapping[str, Any] | None = None,
        soft: bool = True,
        smoothing: float = 0.1,
    ) -> None:
        super().__init__(num_classes, num_annotators, num_labels=num_labels, reduction=reduction, smoothing=smoothing)
        check_method(method)
        if method_options is not None and not isinstance(method_options, Mapping):
            raise ValueError(f"method_options={method_options!r} must be a mapping from names to values")
        self.method = method
        self.method_options = dict(method_options or {})
        self.soft = soft

    def _due(self, epoch: int) -> bool:
        return False

    def _start(self) -> None:
        assert self._annotations is not None
        posterior = self._aggregate(self._annotations)
        weight = None if self._annotations.weight is None else self._annotations.weight.double()
        self._count(label_counts(posterior, self._annotations, weight=weight))
        self._set_targets(posterior if self.soft else most_probable(posterior))

    def _aggregate(self, annotations: Annotations) -> Tensor:
        """``[N, C]`` float64."""
        return aggregate(annotations, self.method, **self.method_options)

    def extra_repr(self) -> str:
        """What ``print(objective)`` adds."""
        return f"{super().extra_repr()}, method={self.method!r}, soft={self.soft}"
