"""Where the batches of a run come from: features of a frozen backbone, or images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from crowdnal.train.config import TrainConfig
from crowdnal.train.data import ImageDataset, derive_seed


class Inputs(Protocol):
    """Where batches of what the model takes come from: ``split`` is ``"images"`` or ``"test"``."""

    def train(self, batches: list[Tensor], epoch: int) -> Iterator[Tensor]:
        """Training input of each batch of rows, on the device."""
        ...

    def evaluate(self, split: str, rows: Tensor) -> Iterator[Tensor]:
        """Evaluation input of rows in order, in batches, on the device."""
        ...

    @property
    def items(self) -> tuple[Any, Any]:
        """All images as a dataset, or a tensor, by row: as they are trained on, and as they are evaluated."""
        ...


class FeatureInputs:
    """Features of a frozen backbone, all on the device."""

    def __init__(self, features: dict[str, Tensor], device: str) -> None:
        self.features = {split: tensor.to(device) for split, tensor in features.items()}

    def train(self, batches: list[Tensor], epoch: int) -> Iterator[Tensor]:
        """See :class:`Inputs`."""
        features = self.features["images"]
        for rows in batches:
            yield features[rows.to(features.device, non_blocking=True)]

    def evaluate(self, split: str, rows: Tensor) -> Iterator[Tensor]:
        """See :class:`Inputs`."""
        features = self.features[split]
        for block in rows.split(8192):
            yield features[block.to(features.device)]

    @property
    def items(self) -> tuple[Any, Any]:
        """See :class:`Inputs`."""
        return self.features["images"], self.features["images"]


class ImageInputs:
    """Images read by worker processes."""

    def __init__(self, train: ImageDataset, evaluate: dict[str, ImageDataset], config: TrainConfig) -> None:
        self.train_images, self.evaluate_images = train, evaluate
        self.device, self.seed = torch.device(str(config.device)), config.seed
        self.size = config.batch_size or 1
        self.workers = config.workers or 0

    def train(self, batches: list[Tensor], epoch: int) -> Iterator[Tensor]:
        """See :class:`Inputs`."""
        self.train_images.seed = derive_seed(self.seed, "augment", epoch)
        return self._load(self.train_images, [rows.tolist() for rows in batches])

    def evaluate(self, split: str, rows: Tensor) -> Iterator[Tensor]:
        """See :class:`Inputs`."""
        return self._load(self.evaluate_images[split], [block.tolist() for block in rows.split(self.size)])

    @property
    def items(self) -> tuple[Any, Any]:
        """See :class:`Inputs`; what is drawn for an image is that of the epoch."""
        return self.train_images, self.evaluate_images["images"]

    def _load(self, images: ImageDataset, batches: list[list[int]]) -> Iterator[Tensor]:
        pin = self.device.type == "cuda"
        # its own generator: a loader draws a seed for its workers, which must not move the epoch's random state
        loader = DataLoader(
            images, batch_sampler=batches, num_workers=min(self.workers, len(batches)), pin_memory=pin,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        for block, _ in loader:
            yield block.to(self.device, non_blocking=pin, memory_format=torch.channels_last)
