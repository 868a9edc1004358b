"""DL-WC: clusters of annotators that share a confusion, then a network; Imamura et al. 2018, Chu et al. 2021."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from crowdnal.aggregation import worker_clustering
from crowdnal.functional import Reduction
from crowdnal.objectives._bases.counted import CountedObjective
from crowdnal.objectives._bases.history import Round
from crowdnal.objectives._bases.targets import most_probable


class DLWC(CountedObjective):
    """Cross-entropy against the posteriors of :func:`crowdnal.worker_clustering`, found once at the start.

    For annotators with few labels: the members of a cluster share a confusion, and ``confusion()`` shows each
    annotator that of their clusters, weighed by membership. ``history`` has a round for every iteration, with the
    lower bound that it raised. Needs ``on_train_start(annotations)``.

    Args:
        num_clusters: M, 1 to R.
        soft: train on the posteriors; otherwise on their most probable class (the first of equals).
        max_iterations: of the clustering.
        smoothing: pseudo-count added to every cell of every cluster's confusion.
        gold: ``[N]`` integers, known true classes of the training set, -1 where unknown. They hold throughout.
    """

    name: ClassVar[str] = "dl-wc"

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        num_labels: int | None = None,
        reduction: Reduction = "mean",
        num_clusters: int = 3,
        soft: bool = True,
        max_iterations: int = 100,
        smoothing: float = 0.01,
        gold: Tensor | None = None,
    ) -> None:
        super().__init__(
            num_classes, num_annotators, num_labels=num_labels, reduction=reduction, smoothing=smoothing, gold=gold
        )
        if not 1 <= num_clusters <= num_annotators:
            raise ValueError(f"num_clusters={num_clusters!r} must be 1 to num_annotators={num_annotators}")
        if max_iterations < 1:
            raise ValueError(f"max_iterations={max_iterations!r} must be 1 or more")
        self.num_clusters = num_clusters
        self.soft = soft
        self.max_iterations = max_iterations

    def _due(self, epoch: int) -> bool:
        return False

    def _start(self) -> None:
        assert self._annotations is not None
        found = worker_clustering(
            self._annotations,
            self.num_clusters,
            max_iterations=self.max_iterations,
            smoothing=self.smoothing,
            gold=self.gold,
        )
        self.history = [Round(n + 1, 0, value) for n, value in enumerate(found.objective)]
        self._show(found.confusion.transpose(1, 2).log())
        self._set_targets(found.posterior if self.soft else most_probable(found.posterior))

    def extra_repr(self) -> str:
        """What ``print(objective)`` adds."""
        return f"{super().extra_repr()}, num_clusters={self.num_clusters}, soft={self.soft}"
