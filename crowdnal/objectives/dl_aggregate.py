"""Aggregate first, then train: by any method of :mod:`crowdnal.aggregation`; DL-GLAD of Chu et al. 2021 for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor

from crowdnal.aggregation import aggregate, check_method
from crowdnal.data import Annotations
from crowdnal.objectives._bases.aggregate_first import AggregateFirst
from crowdnal.objectives._bases.base import ObjectiveOptions
from crowdnal.objectives._registry import register


@register(
    "dl-aggregate",
    link="any aggregation first (crowd-kit's, snorkel's), then cross-entropy",
    source="DL-GLAD and others",
)
class DLAggregate(AggregateFirst):
    """Cross-entropy against the posteriors that an aggregation method finds in the annotations, once, before training.

    Not a model of its own: what the classifier learns does not come back to the annotators. The confusions shown are
    counted against the posteriors. Needs ``on_train_start(annotations)``.

    Args:
        method: of :func:`crowdnal.aggregate`.
        method_options: its options.
        smoothing: pseudo-count added to every cell of every confusion shown; the method has its own.
    """

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        method: str = "dawid-skene", method_options: Mapping[str, Any] | None = None, soft: bool = True,
        smoothing: float = 0.1, **common: Unpack[ObjectiveOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, soft=soft, smoothing=smoothing, **common)
        check_method(method)
        if method_options is not None and not isinstance(method_options, Mapping):
            raise ValueError(f"method_options={method_options!r} must be a mapping from names to values")
        self.method = method
        self.method_options = dict(method_options or {})

    def _aggregate(self, annotations: Annotations) -> Tensor:
        return aggregate(annotations, self.method, **self.method_options)
