"""Data sets of items beside their annotations."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from crowdnal.data.annotations import Annotations

__all__ = ["CrowdDataset"]


class CrowdDataset(Dataset[tuple[Any, Annotations]]):
    """Item i of a data set with the annotations of item i; batch it with ``collate_fn=crowdnal.collate``.

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

    def __len__(self) -> int:
        return len(self.annotations)

    def __getitem__(self, index: int) -> tuple[Any, Annotations]:
        annotations = self.annotations[index]
        sample = self.dataset[index]
        return (sample[0] if isinstance(sample, (tuple, list)) else sample), annotations
