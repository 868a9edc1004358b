"""What there is to know of annotations before a model is trained: numbers, agreement, odd annotators, advice."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from crowdnal.data._vocabulary import Array
from crowdnal.data.annotations import Annotations
from crowdnal.data.summary._advice import Advice, advise
from crowdnal.data.summary._agreement import NONE, Agreement, agreement
from crowdnal.data.summary._annotators import Suspects, suspects
from crowdnal.data.summary._counts import Counts, count

__all__ = ["Advice", "Agreement", "Spread", "Summary", "Suspects", "summarize"]

_SHOWN = 1000  # ids that a summary lists at most


class Spread(NamedTuple):
    """Least, median, mean and largest of some numbers."""

    least: float
    median: float
    mean: float
    most: float

    @classmethod
    def of(cls, numbers: Array) -> Spread:
        """Of an array; zeros where it is empty."""
        if not len(numbers):
            return cls(0, 0, 0, 0)
        return cls(*(float(f(numbers)) for f in (np.min, np.median, np.mean, np.max)))


@dataclass(frozen=True)
class Summary:
    """See :meth:`crowdnal.Annotations.summary`. Ids are those of the vocabulary.

    Attributes:
        items: number of items, and ``annotated`` of those with a label.
        annotators: number of annotators, and ``active`` of those who gave one.
        annotations: number of labels; ``repeated`` of them are not the first of their annotator for their item.
        weighted: whether labels have weights; agreement counts each label once.
        classes: every class, in order, and how many labels it got.
        labels_per_item: over the annotated items.
        labels_per_annotator: over the active annotators.
        items_by_labels: how many items have 0, 1, 2 ... labels, and ``annotators_by_labels`` gave so many.
        shared: items with two labels or more, ``unanimous`` of them with one label only, ``tied`` with several classes
            at the top; ``disputed`` are items none of whose labels occurs twice.
        groups: parts of the annotators that share no item with the others, largest first, as numbers of annotators.
        agreement: Krippendorff's alpha and Fleiss' kappa.
        suspects: annotators who answer at random, always the same, or as another does.
        advice: which methods suit, and why.
    """

    items: int
    annotated: int
    annotators: int
    active: int
    annotations: int
    repeated: int
    weighted: bool
    classes: dict[Any, int]
    labels_per_item: Spread
    labels_per_annotator: Spread
    items_by_labels: dict[int, int]
    annotators_by_labels: dict[int, int]
    shared: int
    unanimous: int
    tied: int
    disputed: list[Any]
    num_disputed: int
    groups: list[int]
    agreement: Agreement
    suspects: Suspects
    advice: list[Advice]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; ids are text."""
        found = asdict(self)
        for name in ("labels_per_item", "labels_per_annotator", "agreement"):
            found[name] = getattr(self, name)._asdict()
        found["advice"] = [advice._asdict() for advice in self.advice]
        found["classes"] = {str(name): number for name, number in self.classes.items()}
        found["disputed"] = list(map(str, self.disputed))
        found["suspects"] = {
            kind: [list(map(str, s)) if isinstance(s, tuple) else str(s) for s in who]
            for kind, who in self.suspects._asdict().items()
        }
        return found


def summarize(annotations: Annotations, *, measure_agreement: bool = True) -> Summary:
    """See :meth:`crowdnal.Annotations.summary`."""
    counts = count(annotations)
    vocabulary, rows = annotations.vocabulary, annotations.item_id
    names = range(annotations.num_annotators) if vocabulary is None else vocabulary.annotators
    classes = range(annotations.num_classes) if vocabulary is None else vocabulary.classes
    disputed = np.flatnonzero(counts.disputed)
    places = disputed if rows is None else rows.cpu().numpy()[disputed]
    items = [i if vocabulary is None else vocabulary.items[i] for i in places[:_SHOWN].tolist()]
    agreed = agreement(counts, classes) if measure_agreement else NONE
    odd, groups = suspects(counts, names), _groups(counts)
    per_item, per_annotator = counts.per_item[counts.per_item > 0], counts.per_annotator[counts.per_annotator > 0]
    return Summary(
        items=annotations.num_items,
        annotated=len(per_item),
        annotators=annotations.num_annotators,
        active=len(per_annotator),
        annotations=annotations.num_annotations,
        repeated=counts.repeated,
        weighted=annotations.weight is not None,
        classes=dict(zip(classes, counts.per_class.tolist(), strict=True)),
        labels_per_item=Spread.of(per_item),
        labels_per_annotator=Spread.of(per_annotator),
        items_by_labels=_histogram(counts.per_item),
        annotators_by_labels=_histogram(counts.per_annotator),
        shared=int(counts.shared.sum()),
        unanimous=int(counts.unanimous.sum()),
        tied=int(counts.tied.sum()),
        disputed=items,
        num_disputed=len(disputed),
        groups=groups,
        agreement=agreed,
        suspects=odd,
        advice=advise(counts, agreed, groups),
    )


def _histogram(numbers: Array) -> dict[int, int]:
    values, times = np.unique(numbers, return_counts=True)
    return dict(zip(values.tolist(), times.tolist(), strict=True))


def _groups(counts: Counts) -> list[int]:
    """Sizes of the connected parts of the graph of annotators and items, in annotators."""
    if not len(counts.item):
        return []
    part = counts.parts()
    sizes = np.unique(part[np.flatnonzero(counts.per_annotator)], return_counts=True)[1]
    return sorted(sizes.tolist(), reverse=True)
