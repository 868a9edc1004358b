"""Annotators who choose a set of tags: each (instance, tag) pair is an item, whose label says whether it was chosen."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from crowdnal._utils.layers import MLP
from crowdnal.data import USUAL, Annotations, Ids, Long, Vocabulary, distinct, in_natural_order, long_fields

if TYPE_CHECKING:
    import pandas

__all__ = ["MultiLabelDataset", "TagClassifier", "from_label_sets"]


def from_label_sets(
    data: pandas.DataFrame | Mapping[str, Any] | str | PathLike[str],
    *,
    task: str = "task",
    worker: str = "worker",
    label: str = "label",
    separator: str = "|",
    weight: str | None = None,
    items: Ids = None,
    annotators: Ids = None,
    tags: Ids = None,
    missing: Any = USUAL,
    format: str = "long",
) -> Annotations:
    """Read one judgement a row: the set of tags that a worker chose for a task.

    Item ``i`` is tag ``i % T`` of instance ``i // T``, and each judgement gives all T items of its instance a label: 1
    where the tag was chosen, else 0. ``vocabulary.items`` are (task, tag) pairs.

    Args:
        data: as for :meth:`Annotations.from_long`.
        task: column of the instance.
        worker: column of the annotator.
        label: column of the chosen tags: text with a separator (``"CAUSES|SYMPTOM"``), a JSON list, or sets, lists or
            tuples. Empty means that none was chosen; None and NaN, and in a file an empty cell, that there was no
            judgement. Tags of a file are text.
        separator: between tags in a text.
        weight: column of the weight of a judgement.
        items: ids of the instances in the order wanted, as for :meth:`Annotations.from_long`, here and below.
        annotators: ids of all annotators.
        tags: ids of all tags, in the order wanted. Default: those found, in natural order.
        missing: what else means that there was no judgement, as for :meth:`Annotations.from_long`.
        format: of a file: long, or the name of a tool's export, as for :meth:`Annotations.read`.

    Raises:
        ValueError: for an unknown or missing id, naming the row, and a tag that is not one of ``tags``.
    """
    if not separator:
        raise ValueError("separator is empty: give the text between two tags")
    want = Long(task, worker, label, weight, missing=missing, sets=True)
    sets = Annotations.trusted(long_fields(data, want, items, annotators, format))
    ids = sets.vocabulary
    assert ids is not None
    chosen = [_members(value, separator) for value in ids.classes]
    names = _tags(chosen, tags)
    place = {tag: t for t, tag in enumerate(names)}
    for value, members in zip(ids.classes, chosen, strict=True):
        for tag in members:
            if tag not in place:
                raise ValueError(f"{tag!r} of {label} {value!r} is not in tags: add it there, or drop the rows")
    member = torch.zeros(len(chosen), len(names), dtype=torch.int64)
    for code, members in enumerate(chosen):
        member[code, [place[tag] for tag in members]] = 1
    vocabulary = Vocabulary(tuple((i, tag) for i in ids.items for tag in names), ids.annotators, (0, 1))
    return _expand(sets, member, vocabulary)


def _expand(sets: Annotations, member: Tensor, vocabulary: Vocabulary) -> Annotations:
    """The labels of each set as labels of T items."""
    num_tags = member.shape[1]
    counts = sets.counts.repeat_interleave(num_tags)
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    item = torch.arange(len(counts)).repeat_interleave(counts)
    judgement = sets.indptr[item // num_tags] + torch.arange(len(item)) - indptr[item]
    return Annotations(
        indptr,
        sets.annotator[judgement],
        member[sets.label[judgement], item % num_tags],
        num_annotators=sets.num_annotators,
        num_classes=2,
        weight=None if sets.weight is None else sets.weight[judgement],
        item_id=torch.arange(len(counts)),
        vocabulary=vocabulary,
    )


def _members(value: Hashable, separator: str) -> list[Hashable]:
    if isinstance(value, frozenset):
        return list(value)
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        try:
            return [str(tag) for tag in json.loads(value)]
        except json.JSONDecodeError:
            pass
    if isinstance(value, str):
        return [tag.strip() for tag in value.split(separator) if tag.strip()]
    return [value]


def _tags(chosen: list[list[Hashable]], tags: Ids) -> tuple[Hashable, ...]:
    if tags is not None:
        names = distinct(tags, "tags")
    else:
        names = tuple(in_natural_order({tag for members in chosen for tag in members}))
    if not names:
        raise ValueError("data has no tag: give tags=")
    return names


class MultiLabelDataset(Dataset[tuple[Any, Annotations]]):
    """Instance i of a data set with the annotations of its tags; batch it with ``collate_fn=crowdnal.collate``.

    Args:
        dataset: map-style; of a sample that is a tuple or list, the first entry is taken.
        annotations: of ``num_tags`` items a sample, as :func:`from_label_sets` gives them, on the CPU.
        num_tags: T.

    Raises:
        ValueError: if the lengths do not fit.
    """

    def __init__(self, dataset: Any, annotations: Annotations, num_tags: int) -> None:
        if len(dataset) * num_tags != len(annotations):
            raise ValueError(
                f"dataset has {len(dataset)} samples and annotations {len(annotations)} items, which is not "
                f"num_tags={num_tags} a sample: read them with items= (in the order of the samples) and tags="
            )
        self.dataset = dataset
        self.annotations = annotations
        self.num_tags = num_tags

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Annotations]:
        start = range(len(self))[index] * self.num_tags
        sample = self.dataset[index]
        annotations = self.annotations[start : start + self.num_tags]
        return (sample[0] if isinstance(sample, (tuple, list)) else sample), annotations


class TagClassifier(nn.Module):
    """Whether an instance has a tag, for all T tags: an MLP whose first layer is scaled by the tag's embedding.

    Scaled, unit by unit, before the ReLU: a network on features and embedding side by side takes far more steps to
    learn that tags depend on different features, and until then gives an instance all its tags or none.

    ``forward(instances) -> (logits [B·T, C], features [B·T, D])``, the items of an instance side by side: attach it to
    :class:`crowdnal.LIAML`, or to any other objective.

    Args:
        backbone: gives features ``[B, D]``: a timm model with ``num_classes=0``, or ``torch.nn.Identity()``.
        num_tags: T.
        feature_dim: D.
        num_classes: C, of each tag.
        tag_dim: length of a tag's embedding.
        hidden_dim: units of the hidden layers.
        num_layers: hidden layers, 1 or more.
    """

    def __init__(
        self,
        backbone: nn.Module,
        num_tags: int,
        *,
        feature_dim: int,
        num_classes: int = 2,
        tag_dim: int = 16,
        hidden_dim: int = 16,
        num_layers: int = 4,
    ) -> None:
        super().__init__()
        if type(num_layers) is not int or num_layers < 1:
            raise ValueError(f"num_layers={num_layers!r} must be an integer, 1 or more")
        self.backbone = backbone
        self.tags = nn.Parameter(torch.randn(num_tags, tag_dim))
        self.units = nn.Linear(feature_dim, hidden_dim)
        self.scale = nn.Linear(tag_dim, hidden_dim)
        self.head = MLP(hidden_dim, [hidden_dim] * (num_layers - 1), num_classes)

    def forward(self, instances: Any) -> tuple[Tensor, Tensor]:
        """See the class."""
        features: Tensor = self.backbone(instances)
        scaled = self.units(features).unsqueeze(1) * self.scale(self.tags)
        return self.head(scaled.flatten(0, 1).relu()), features.repeat_interleave(len(self.tags), 0)
