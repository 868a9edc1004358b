"""Data sets of items beside their annotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

from crowdnal.data.annotations import Annotations

__all__ = ["CrowdDataset"]


class CrowdDataset(Dataset[tuple[Any, Annotations]]):
    """Item i of a data set with the annotations of item i; batch it with ``collate_fn=crowdnal.collate``.

    ``transform`` is that of the data set (timm's ``create_loader`` sets it); where that has none, it is applied here.

    Args:
        dataset: map-style. Of a sample that is a tuple or list, such as (image, target), the first entry is
            taken: the target is what annotations stand in for.
        annotations: one item a sample, in the same order, on the CPU.

    Raises:
        ValueError: if the two differ in length.
    """

    def __init__(self, dataset: Any, annotations: Annotations) -> None:
        if len(dataset) != len(annotations):
            raise ValueError(
                f"dataset has {len(dataset)} samples and annotations {len(annotations)} items; read the "
                "annotations with items= (in the order of the samples), or index them: annotations[rows]"
            )
        self.dataset = dataset
        self.annotations = annotations
        self._transform: Callable[[Any], Any] | None = None

    @property
    def transform(self) -> Callable[[Any], Any] | None:
        """Of samples, None for none."""
        return getattr(self.dataset, "transform", self._transform)

    @transform.setter
    def transform(self, transform: Callable[[Any], Any] | None) -> None:
        if hasattr(self.dataset, "transform"):
            self.dataset.transform = transform
        else:
            self._transform = transform

    def __len__(self) -> int:
        return len(self.annotations)

    def __getitem__(self, index: int) -> tuple[Any, Annotations]:
        annotations = self.annotations[index]
        sample = self.dataset[index]
        sample = sample[0] if isinstance(sample, (tuple, list)) else sample
        return (sample if self._transform is None else self._transform(sample)), annotations
