"""Annotations for the tests: drawn by hypothesis, built from lists and back to lists, simulated."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from crowdnal import metrics
from crowdnal.aggregation import vote_proportions
from crowdnal.data import Annotations
from crowdnal.simulation import simulate

NAN = float("nan")
Rows = list[list[tuple[int, int]]]  # for each item its (annotator, label) pairs


def build(rows: Rows, annotators: int, classes: int, **kwargs) -> Annotations:
    indptr = np.cumsum([0] + [len(row) for row in rows])
    flat = [pair for row in rows for pair in row]
    return Annotations(
        indptr,
        [r for r, _ in flat],
        [y for _, y in flat],
        num_annotators=annotators,
        num_classes=classes,
        **kwargs,
    )


def to_rows(a: Annotations) -> Rows:
    pairs = list(zip(a.annotator.tolist(), a.label.tolist(), strict=True))
    ends = a.indptr.tolist()
    return [pairs[i:j] for i, j in zip(ends[:-1], ends[1:], strict=True)]


def assert_equal(a: Annotations, b: Annotations) -> None:
    assert (a.num_annotators, a.num_classes) == (b.num_annotators, b.num_classes)
    for name in ("indptr", "annotator", "label", "weight", "item_id"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        assert x is None or (torch.equal(x, y) and x.dtype == y.dtype), name


@st.composite
def crowds(draw: st.DrawFn, repeats: bool = True) -> tuple[Rows, int, int]:
    annotators, classes = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    pair = st.tuples(st.integers(0, annotators - 1), st.integers(0, classes - 1))
    unique_by = None if repeats else (lambda p: p[0])
    rows = draw(st.lists(st.lists(pair, max_size=6, unique_by=unique_by), max_size=7))
    return rows, annotators, classes


@st.composite
def weighted(draw: st.DrawFn) -> Annotations:
    rows, annotators, classes = draw(crowds())
    size = sum(map(len, rows))
    weight = draw(st.none() | st.lists(st.floats(0, 4, width=32), min_size=size, max_size=size))
    item_id = draw(st.none() | st.permutations(range(len(rows))))
    weight = None if weight is None else torch.tensor(weight, dtype=torch.float32)
    return build(rows, annotators, classes, weight=weight, item_id=item_id)


def crowd(items: int = 24, annotators: int = 5, classes: int = 3, seed: int = 0) -> Annotations:
    generator = np.random.default_rng(seed)
    names = [f"image {i}" for i in range(items)]
    task = [0] * 7 + list(generator.integers(0, items, 3 * items))
    data = {
        "task": [names[i] for i in task],
        "worker": generator.integers(0, annotators, len(task)),
        "label": generator.integers(0, classes, len(task)),
        "sure": generator.random(len(task)),
    }
    return Annotations.from_long(data, items=names, annotators=annotators, classes=classes, weight="sure")


def simulated(classes: int, annotators: int, items: int) -> tuple[Annotations, Tensor, Tensor]:
    """(annotations, truth, confusions); some rows of a confusion hold little, so that counts of 0 occur."""
    generator = torch.Generator().manual_seed(classes)
    noise = 2 * torch.randn(annotators, classes, classes, generator=generator, dtype=torch.double)
    confusion = (noise + 3 * torch.eye(classes)).softmax(2)
    truth = torch.randint(classes, (items,), generator=generator)
    return simulate(truth, confusion, annotations_per_item=5, seed=1), truth, confusion


def coins(seed: int = 0) -> tuple[Annotations, Tensor, Tensor]:
    """(annotations, truth, reliabilities) of 40 annotators who are right with .3 to .95, 4 classes."""
    reliability = torch.linspace(0.3, 0.95, 40, dtype=torch.double)
    eye = torch.eye(4, dtype=torch.bool)
    confusion = torch.where(eye, reliability.view(-1, 1, 1), (1 - reliability.view(-1, 1, 1)) / 3)
    truth = torch.randint(4, (400,), generator=torch.Generator().manual_seed(seed))
    return simulate(truth, confusion, annotations_per_item=8, seed=seed), truth, reliability


def ahead(posterior: Tensor, a: Annotations, truth: Tensor) -> float:
    """How much more often it is right than the votes."""
    return metrics.accuracy(posterior, truth) - metrics.accuracy(vote_proportions(a, a.num_classes), truth)
