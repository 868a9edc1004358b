"""The training items beside their loader: all of them in order, and endless streams of meta batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from crowdnal.data import CrowdDataset
from crowdnal.training import CrowdModel, predict_items

MetaBatch = tuple[Tensor, Tensor]


class Items:
    """Images of items by row.

    Args:
        dataset: items with their annotations; a tensor inside it is indexed as a whole.
        batch_size: of passes over all items.
        num_workers: of each ``DataLoader``, for what is no tensor.
    """

    def __init__(self, dataset: CrowdDataset, batch_size: int, num_workers: int) -> None:
        self.dataset, self.batch_size, self.num_workers = dataset, batch_size, num_workers

    def logits(self, model: CrowdModel, device: torch.device) -> Tensor:
        """``[N, C]`` of the model in evaluation mode, under the caller's autocast."""
        rows = torch.arange(len(self.dataset))
        batches = [batch.tolist() for batch in rows.split(self.batch_size)]
        loaded = ((rows, images) for images, rows in self.load(rows, rows, batches, device))
        kind = device.type
        amp = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return predict_items(model, loaded, len(self.dataset), amp=amp)[0]

    def meta_batches(
        self, rows: Tensor, labels: Tensor, size: int, seed: int, skip: int, device: torch.device
    ) -> Iterator[MetaBatch]:
        """Images and labels of the meta set for ever, one permutation after the other, the first ``skip`` left out."""
        return self.load(rows, labels, _Endless(len(rows), min(size, len(rows)), seed, skip), device)

    def load(self, rows: Tensor, labels: Tensor, batches: Any, device: torch.device) -> Iterator[MetaBatch]:
        """Images of rows, and their labels, by batches of positions; on the device, for which nobody waits."""
        pin = device.type == "cuda"

        def send(tensor: Tensor) -> Tensor:
            return (tensor.pin_memory() if pin and tensor.device.type == "cpu" else tensor).to(
                device, non_blocking=True
            )

        images = self.dataset.dataset
        if isinstance(images, Tensor):
            for batch in batches:
                chosen = rows[batch] if images.device.type == "cpu" else send(rows[batch])
                yield send(images[chosen]), send(labels[batch])
            return
        # its own generator: a loader draws a seed for its workers, which must not move the training's random state
        loader = DataLoader(
            _Labelled(images, rows, labels), batch_sampler=batches, num_workers=self.num_workers, pin_memory=pin,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        for block, found in loader:
            yield send(block), send(found)


class _Labelled(Dataset[tuple[Any, int]]):
    """Image and label by position in a list of rows."""

    def __init__(self, images: Any, rows: Tensor, labels: Tensor) -> None:
        self.images, self.rows, self.labels = images, rows.tolist(), labels.tolist()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> tuple[Any, int]:
        sample = self.images[self.rows[position]]
        return (sample[0] if isinstance(sample, (tuple, list)) else sample), self.labels[position]


class _Endless:
    """Batches of positions 0 .. length - 1, shuffled anew each time all were there."""

    def __init__(self, length: int, size: int, seed: int, skip: int) -> None:
        self.length, self.size, self.seed, self.skip = length, size, seed, skip

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed)
        waiting, taken = torch.empty(0, dtype=torch.int64), 0
        while True:
            while len(waiting) < self.size:
                waiting = torch.cat([waiting, torch.randperm(self.length, generator=generator)])
            batch, waiting = waiting[: self.size], waiting[self.size :]
            if taken >= self.skip:
                yield batch.tolist()
            taken += 1
