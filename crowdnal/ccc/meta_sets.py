"""Both models' meta sets, and the batches that come from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from crowdnal._utils.distributed import num_processes, sum_over_processes
from crowdnal.ccc.data import Items, MetaBatch
from crowdnal.ccc.distillation import distill
from crowdnal.training import CrowdModel


class MetaSets:
    """The meta set of each model and its endless stream of batches; a copy starts without the training items.

    Args:
        size: M.
        batch_size: of a meta batch.

    Attributes:
        sets: rows and pseudo labels for each model, once distilled.
    """

    def __init__(self, size: int, batch_size: int) -> None:
        self.size, self.batch_size = size, batch_size
        self.sets: list[tuple[Tensor, Tensor]] = []
        self.items: Items | None = None
        self.evaluation: Items | None = None
        self._streams: dict[int, Iterator[MetaBatch]] = {}

    def use(self, items: Items, evaluation: Items) -> None:
        """The items that meta batches come from, and those that are distilled."""
        self.items, self.evaluation = items, evaluation
        self.restart()

    def restart(self) -> None:
        """The next batch of each stream is found anew."""
        self._streams = {}

    def distill(self, models: Sequence[CrowdModel], device: torch.device) -> None:
        """For each of the two models from the other one.

        Raises:
            ValueError: there are no training items.
        """
        if self.evaluation is None:
            raise ValueError("CCC distils its meta sets from the training items: call on_train_start(dataset) first")
        logits = [sum_over_processes(self.evaluation.logits(model, device)) / num_processes() for model in models]
        annotations = self.evaluation.dataset.annotations
        self.sets = [distill(other, annotations, self.size) for other in reversed(logits)]
        self.restart()

    def batch(self, k: int, seed: int, skip: int, device: torch.device) -> MetaBatch:
        """The next of model k; a new stream starts after ``skip`` batches.

        Raises:
            ValueError: there are no training items or no meta sets.
        """
        if k not in self._streams:
            if self.items is None or not self.sets:
                raise ValueError(
                    "there is no meta set yet: call on_train_start(dataset) before training, and on_epoch_start(epoch) "
                    "before every epoch"
                )
            self._streams[k] = self.items.meta_batches(*self.sets[k], self.batch_size, seed, skip, device)
        return next(self._streams[k])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "items": None, "evaluation": None, "_streams": {}}
