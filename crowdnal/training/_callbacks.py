"""What an objective needs of a training loop beside its loss: the hooks, and predictions of the whole training set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from crowdnal._utils.distributed import num_processes, sum_over_processes
from crowdnal.data import Annotations, concat
from crowdnal.objectives import GIVE, ItemNumbers, Predict, Round, item_rows, row_table
from crowdnal.training._model import unwrapped
from crowdnal.training._predict import device_of, predict_items


class ObjectiveCallback:
    """Calls the hooks of any objective in a plain loop; EM-style ones refresh their targets between epochs by them.

        callback = crowdnal.ObjectiveCallback(model, loader)
        for epoch in range(epochs):
            callback.on_epoch_start(epoch)
            ...  # train
            callback.on_epoch_end(epoch)

    A resumed run begins with its own epoch number, after ``model.load_state_dict``. The first call begins the training,
    which :meth:`begin` does alone, where something (an optimizer, a random state) is to come after that.

    Under several processes the loader of each may give its share of the items (``DistributedSampler``); together they
    give all of them, and every process gets the predictions of all. Predicting neither moves the random state of the
    CPU nor the model; a loader with a ``generator`` of its own moves that one.

    Args:
        model: what :func:`crowdnal.attach` returned; compiled or in ``DistributedDataParallel`` too.
        loader: gives batches ``(images, annotations)`` (metadata may follow), or mappings with annotations among their
            values, of every item of the training set once, in any order: without augmentation and with
            ``drop_last=False``. It may be the loader that trains, if that is so.
        annotations: of the training set. Default: those of the loader's ``CrowdDataset``, or else what a pass over the
            loader gives.
        amp: autocast dtype of the predictions, None for none.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        annotations: Annotations | None = None,
        *,
        amp: torch.dtype | None = None,
    ) -> None:
        self.model = unwrapped(model)
        self.loader = loader
        self.amp = amp
        self._annotations = annotations
        self._row_of: Tensor | None = None
        self._numbers = ItemNumbers(None)
        self._begun = False

    @property
    def history(self) -> list[Round]:
        """What each round reported, its log-likelihood for one; empty where the objective has no rounds."""
        return list(getattr(self.model.objective, "history", []))

    @property
    def annotations(self) -> Annotations:
        """Of the training set."""
        if self._annotations is None:
            found = getattr(getattr(self.loader, "dataset", None), "annotations", None)
            self._annotations = found if isinstance(found, Annotations) else self._collected()
        return self._annotations

    def begin(self, epoch: int = 0, predict: Predict | None = None) -> None:
        """Starts training, or resumes it in a later epoch than 0; does nothing when called again.

        Args:
            epoch: the first one.
            predict: what :meth:`predict` gives, from elsewhere than the loader.
        """
        if not self._begun:
            self._row_of = row_table(self.annotations.item_id)
            self._numbers = ItemNumbers(self.annotations.vocabulary)
            objective = self.model.objective
            begin = objective.on_train_start if epoch == 0 else objective.on_train_resume
            begin(self.annotations, predict or self.predict)
            self._begun = True

    def on_epoch_start(self, epoch: int) -> None:
        """Call before every epoch, 0 the first."""
        self.begin(epoch)
        self.model.objective.on_epoch_start(epoch)

    def on_epoch_end(self, epoch: int) -> None:
        """Call after every epoch."""
        self.model.objective.on_epoch_end(epoch)

    @torch.no_grad()
    def predict(self) -> tuple[Tensor, Tensor | None]:
        """Logits ``[N, C]`` and features of the training set in its order, in evaluation mode, float32 at least.

        Those of a :class:`crowdnal.CrossFit` are out of fold.

        Raises:
            ValueError: the loader leaves items out, or gives one that the training set does not have.
        """
        size, device = len(self.annotations), device_of(self.model)
        seen = torch.zeros(size, device=device)

        def batches() -> Iterator[tuple[Tensor, Any]]:
            for images, batch in map(_pair, self.loader):
                rows = item_rows(_ids(self._numbers.of(batch), batch, size), self._row_of, size).to(device)
                seen[rows] = 1.0
                yield rows, _to(images, device)

        with torch.random.fork_rng(devices=[]):
            logits, features = predict_items(self.model, batches(), size, amp=self.amp, out_of_fold=True)
        known = sum_over_processes(seen)  # each knows its own items; several may know of the same
        if bool((known == 0).any()):
            row = int((known == 0).nonzero()[0, 0])
            raise ValueError(
                f"loader gave {int((known > 0).sum())} of the {len(known)} items of the training set, item {row} not: "
                "predictions of all are needed, so give a loader of the whole set with drop_last=False"
            )

        def mean(table: Tensor) -> Tensor:
            return sum_over_processes(table) / known.unsqueeze(1).to(table.dtype)

        return mean(logits), None if features is None else mean(features)

    def _collected(self) -> Annotations:
        if num_processes() > 1:
            raise ValueError("loader has no CrowdDataset: give annotations= of the whole training set to each process")
        with torch.random.fork_rng(devices=[]):
            batches = [annotations.to("cpu") for _, annotations in map(_pair, self.loader)]
        every = concat(batches)
        if every.item_id is None and len(batches) == 1:
            return every
        if every.item_id is None:
            raise ValueError("the loader's annotations have no item_id: give annotations= of the training set")
        return every[torch.argsort(every.item_id)]


def _pair(batch: Any) -> tuple[Any, Annotations]:
    """Images and annotations of a tuple (metadata may follow) or of a mapping, whose true ``labels`` are no input."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    given = [part for part in parts if isinstance(part, Annotations)]
    if len(given) == 1 and isinstance(batch, Mapping):
        return {k: v for k, v in batch.items() if k != "labels" and not isinstance(v, Annotations)}, given[0]
    if len(given) == 1 and len(parts) >= 2 and not isinstance(parts[0], Annotations):
        return parts[0], given[0]
    raise ValueError(
        f"loader gave a {type(batch).__name__} that is no (images, annotations): use a CrowdDataset with "
        "collate_fn=crowdnal.collate"
    )


def _ids(item_id: Tensor | None, annotations: Annotations, size: int) -> Tensor:
    if item_id is not None:
        return item_id.cpu()
    if len(annotations) == size:
        return torch.arange(size)
    raise ValueError(f"a batch of {len(annotations)} items has no item_id: {GIVE}")


def _to(images: Any, device: torch.device) -> Any:
    """Tensors in tuples, lists and mappings too."""
    return tree_map(lambda part: part.to(device) if hasattr(part, "to") else part, images)


EMCallback = ObjectiveCallback
"""As loops of EM objectives call it."""
