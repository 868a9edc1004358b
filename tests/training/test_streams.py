"""Whose annotations a batch has: ids that nobody gave are unknown, and any hashable id will do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import crowdnal
from crowdnal import Annotations

N, C = 6, 4
LABELS = torch.tensor([[i % C] * 3 for i in range(N)])  # all agree
PERFECT = 20.0 * torch.nn.functional.one_hot(LABELS[:, 0], C).float()
NAMES = [f"image-{i}" for i in range(N)]


def begun(whole: Annotations, **options: Any) -> crowdnal.DLDS:
    objective = crowdnal.DLDS(C, 3, **options)
    objective.on_train_start(whole)
    return objective


def long(rows: Iterable[int]) -> Annotations:
    """Read by itself, as in a collate function: only what these rows say is known."""
    table = [{"task": NAMES[i], "worker": r, "label": int(LABELS[i, r])} for i in rows for r in range(3)]
    return Annotations.from_long(table, annotators=3, classes=C)


def test_ids_that_nobody_gave_are_unknown_not_0() -> None:
    objective = begun(Annotations.from_dense(LABELS, num_classes=C))
    single = [Annotations.from_dense(row[None], num_classes=C) for row in LABELS]
    named = [Annotations.from_dense(row[None], classes=range(C)) for row in LABELS]
    for stream in (
        Annotations.from_dense(LABELS[2:4], num_classes=C),
        crowdnal.collate(single[2:4]),
        crowdnal.collate(named[2:4]),
    ):
        assert stream.item_id is None
        with pytest.raises(ValueError, match=r"no item_id and 2 items, but the training set has 6.*items=\[...\]"):
            objective(PERFECT[2:4], stream)
    shuffled = Annotations.from_dense(LABELS.flip(0), num_classes=C)  # as many as there are, but others
    with pytest.raises(ValueError, match="no item_id and 6 items, but the training set has 6"):
        objective(PERFECT.flip(0), shuffled)
    assert float(objective(PERFECT, Annotations.from_dense(LABELS, num_classes=C))) < 1e-6
    assert math.isfinite(
        float(crowdnal.CrowdLayer(C, 3)(PERFECT, shuffled).detach())
    )  # nobody's targets are stored here


WAYS: dict[str, tuple[Callable[[], Annotations], Callable[[int], Annotations]]] = {
    "rows as ids": (
        lambda: Annotations.from_dense(LABELS, num_classes=C),
        lambda i: Annotations.from_dense(LABELS[i][None], num_classes=C, items=[i]),
    ),
    "item_id": (
        lambda: Annotations.from_dense(LABELS, num_classes=C),
        lambda i: Annotations([0, 3], [0, 1, 2], LABELS[i], num_annotators=3, num_classes=C, item_id=[i]),
    ),
    "a column": (lambda: long(range(N)), lambda i: long([i])),
    "ids of a matrix": (
        lambda: Annotations.from_dense(LABELS, num_classes=C, items=NAMES),
        lambda i: Annotations.from_dense(LABELS[i][None], num_classes=C, items=[NAMES[i]]),
    ),
    "rows of the data set": (
        lambda: Annotations.from_dense(LABELS, num_classes=C),
        lambda i: Annotations.from_dense(LABELS, num_classes=C)[i],
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_batches_find_their_targets_by_whatever_id(way: str) -> None:
    read_whole, read_one = WAYS[way]
    objective = begun(read_whole(), gold=LABELS[:, 0])
    rows = [4, 1, 3]
    batch = crowdnal.collate([read_one(i) for i in rows])
    assert float(objective(PERFECT[rows], batch)) < 1e-6
    assert objective._rows(batch).argmax(1).tolist() == LABELS[rows, 0].tolist()
    assert objective._gold_of(batch).tolist() == LABELS[rows, 0].tolist()


def test_an_id_that_the_training_set_does_not_have_is_named() -> None:
    unknown = Annotations.from_dense(LABELS[:2], num_classes=C, items=["image-1", "elsewhere"])
    with pytest.raises(ValueError, match="item 1 of the batch is 'elsewhere', but the training set has 6 others"):
        begun(long(range(N)))(PERFECT[:2], unknown)
    with pytest.raises(ValueError, match=r"item 0 of the batch is 'image-1', but the training set has no ids \(read"):
        begun(Annotations.from_dense(LABELS, num_classes=C))(PERFECT[:2], unknown)


def collate(rows: list[int]) -> tuple[torch.Tensor, Annotations]:
    return PERFECT[rows], long(rows)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_read_in_workers_keeps_its_ids(workers: int) -> None:
    loader = DataLoader([5, 0, 3, 2], batch_size=2, collate_fn=collate, num_workers=workers)  # type: ignore[arg-type]
    objective = begun(long(range(N)))
    assert [float(objective(x, a)) < 1e-6 for x, a in loader] == [True, True]


def test_the_callback_predicts_a_stream() -> None:
    model = crowdnal.attach(torch.nn.Identity(), crowdnal.DLEM(C, 3))
    loader = [collate([3, 0, 5]), collate([1, 2, 4])]
    callback = crowdnal.ObjectiveCallback(model, loader, long(range(N)))
    callback.begin()
    assert torch.equal(callback.predict()[0], PERFECT)


def test_walkers_over_containers_end() -> None:
    """Lightning looks into whatever is iterable for tensors: one item must not contain itself."""
    from collections.abc import Iterable

    a = Annotations.from_dense(LABELS, num_classes=C)
    assert not isinstance(a, Iterable)
    assert [one.label.tolist() for one in a] == LABELS.tolist()  # type: ignore[attr-defined]


class Named(torch.nn.Module):
    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels


@pytest.mark.parametrize("kind", ["tuple", "list", "mapping"])
def test_batches_carry_metadata(kind: str) -> None:
    a = Annotations.from_dense(LABELS, num_classes=C)
    rows = [torch.tensor([4, 0]), torch.tensor([1, 2, 3, 5])]
    loader: list[Any] = [(PERFECT[r], {"camera": 1}, a[r]) for r in rows]
    if kind == "list":
        loader = [[PERFECT[r], a[r], ["a", "b"]] for r in rows]
    elif kind == "mapping":
        loader = [{"pixels": PERFECT[r], "annotations": a[r], "labels": r} for r in rows]
    model = crowdnal.attach(Named() if kind == "mapping" else torch.nn.Identity(), crowdnal.DLEM(C, 3))
    callback = crowdnal.ObjectiveCallback(model, loader)
    callback.begin()
    assert torch.equal(callback.predict()[0], PERFECT) and torch.equal(callback.annotations.label, a.label)
    with pytest.raises(ValueError, match="loader gave a tuple that is no"):
        crowdnal.ObjectiveCallback(model, [(a, PERFECT)], a).predict()
