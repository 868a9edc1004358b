"""DL-WC: clusters of annotators that share a confusion, then a network; Imamura et al. 2018, Chu et al. 2021."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from crowdnal._utils.options import check_integer
from crowdnal.aggregation import worker_clustering
from crowdnal.data import Annotations
from crowdnal.objectives._bases.aggregate_first import AggregateFirst
from crowdnal.objectives._bases.base import ObjectiveOptions
from crowdnal.objectives._bases.history import Round
from crowdnal.objectives._registry import register


@register("dl-wc", link="clusters of annotators share A, first, then cross-entropy", source="Imamura et al. 2018")
class DLWC(AggregateFirst):
    """Cross-entropy against the posteriors of :func:`crowdnal.worker_clustering`, found once before training.

    For annotators with few labels: the members of a cluster share a confusion, and ``confusion()`` shows each
    annotator that of their clusters, weighted by membership; with labels behind the classes, which the clusters leave
    out, their own. ``history`` has a round for every iteration, with the lower bound that it raised. Needs
    ``on_train_start(annotations)``.

    Args:
        num_clusters: M, 1 to R; None: as :func:`crowdnal.worker_clustering` finds it.
        max_iterations: of the clustering.
        smoothing: pseudo-count added to every cell of every cluster's confusion.
    """

    counted = False

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        num_clusters: int | None = None, soft: bool = True, max_iterations: int = 100, smoothing: float = 0.01,
        gold: Tensor | None = None, **common: Unpack[ObjectiveOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, soft=soft, smoothing=smoothing, gold=gold, **common)
        if num_clusters is not None and not 1 <= num_clusters <= num_annotators:
            raise ValueError(f"num_clusters={num_clusters!r} must be 1 to num_annotators={num_annotators}")
        check_integer(1, max_iterations=max_iterations)
        self.num_clusters = num_clusters
        self.max_iterations = max_iterations

    def _aggregate(self, annotations: Annotations) -> Tensor:
        found = worker_clustering(
            annotations,
            self.num_clusters,
            max_iterations=self.max_iterations,
            smoothing=self.smoothing,
            gold=self.gold,
        )
        self.history = [Round(n + 1, 0, value) for n, value in enumerate(found.objective)]
        if annotations.num_classes == self.num_labels:
            self._show(found.confusion.transpose(1, 2).log())
        return found.posterior
