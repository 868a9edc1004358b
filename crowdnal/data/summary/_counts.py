"""What everything in a summary is computed from: the labels as arrays, the votes of each item as a sparse matrix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from crowdnal._utils.extras import require
from crowdnal.data._vocabulary import Array
from crowdnal.data.annotations import Annotations

_SEED = 0  # of the items drawn where all of them would take too long


@dataclass(frozen=True)
class Counts:
    """Item, annotator and label of every annotation, ``[nnz]``, items in order; and the sizes N, R, K."""

    item: Array
    annotator: Array
    label: Array
    size: tuple[int, int, int]

    @cached_property
    def votes(self) -> Any:
        """``[N, K]`` sparse: how many labels of each class an item has."""
        sparse = require("scipy.sparse", extra="train")
        ones = np.ones(len(self.item), dtype=np.int64)
        return sparse.csr_array((ones, (self.item, self.label)), shape=(self.size[0], self.size[2]))

    @cached_property
    def per_item(self) -> Array:
        """``[N]`` labels."""
        return np.bincount(self.item, minlength=self.size[0])

    @cached_property
    def per_annotator(self) -> Array:
        """``[R]`` labels."""
        return np.bincount(self.annotator, minlength=self.size[1])

    @cached_property
    def per_class(self) -> Array:
        """``[K]`` labels."""
        return np.bincount(self.label, minlength=self.size[2])

    @cached_property
    def repeated(self) -> int:
        """Labels that are not the first of their annotator for their item."""
        pair = np.sort(self.item * self.size[1] + self.annotator)
        return int((pair[1:] == pair[:-1]).sum())

    @cached_property
    def top(self) -> Array:
        """``[N]`` votes of the class that has most."""
        most = np.zeros(self.size[0], dtype=np.int64)
        starts = self.votes.indptr[:-1][self.per_item > 0]
        if len(starts):
            most[self.per_item > 0] = np.maximum.reduceat(self.votes.data, starts)
        return most

    @property
    def shared(self) -> Array:
        """``[N]`` whether it has two labels or more."""
        return self.per_item > 1

    @property
    def unanimous(self) -> Array:
        """``[N]`` whether all its labels, two or more, are one."""
        return self.shared & (self.top == self.per_item)

    @property
    def disputed(self) -> Array:
        """``[N]`` whether none of its labels, two or more, occurs twice."""
        return self.shared & (self.top == 1)

    @property
    def tied(self) -> Array:
        """``[N]`` whether several classes have most votes."""
        row = np.repeat(np.arange(self.size[0]), np.diff(self.votes.indptr))
        at_top = np.bincount(row[self.votes.data == self.top[row]], minlength=self.size[0])
        return self.shared & (at_top > 1)

    def parts(self) -> Array:
        """``[R]`` which connected part of the graph of annotators and items each belongs to."""
        graph = require("scipy.sparse.csgraph", extra="train")
        sparse = require("scipy.sparse", extra="train")
        num_items, num_annotators, _ = self.size
        nodes = num_annotators + num_items
        edges = (np.ones(len(self.item), dtype=np.int8), (self.annotator, num_annotators + self.item))
        return graph.connected_components(sparse.coo_array(edges, shape=(nodes, nodes)), directed=False)[1][
            :num_annotators
        ]

    def of_items(self, cost: Array, limit: float) -> Counts:
        """All of it, or the labels of items drawn at random until their cost ``[N]`` reaches the limit."""
        if cost.sum() <= limit:
            return self
        order = np.random.default_rng(_SEED).permutation(self.size[0])
        kept = np.zeros(self.size[0], dtype=bool)
        kept[order[: int(np.searchsorted(np.cumsum(cost[order]), limit, side="right"))]] = True
        chosen = kept[self.item]
        return Counts(self.item[chosen], self.annotator[chosen], self.label[chosen], self.size)


def count(annotations: Annotations) -> Counts:
    """The arrays of some annotations."""
    item, annotator, label = (t.cpu().numpy() for t in (annotations.item, annotations.annotator, annotations.label))
    return Counts(item, annotator, label, (annotations.num_items, annotations.num_annotators, annotations.num_classes))
