"""What users of such libraries report, where no other test holds it, and that the table of all of it is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.compare import assert_close
from support.memory import Largest

import crowdnal
from crowdnal import Annotations, CrowdDataset, collate
from crowdnal import functional as F

TESTS = Path(__file__).parent
TABLE = TESTS / "README.md"


def named() -> list[tuple[str, str]]:
    """File and function of every test that the README names as ``path::name``."""
    return re.findall(r"`([\w/]+\.py)::(test_\w+)`", TABLE.read_text("utf-8"))


def test_every_test_of_the_table_exists() -> None:
    assert len(named()) > 80
    for path, name in named():
        assert re.search(rf"^def {name}\(", (TESTS.parent / path).read_text("utf-8"), re.MULTILINE), f"{path}::{name}"


def test_every_row_of_the_tables_names_a_test() -> None:
    text = TABLE.read_text("utf-8")
    for section in ("What users report", "What was found"):
        rows = text.partition(f"## {section}")[2].partition("\n## ")[0].splitlines()
        told = [row for row in rows if row.startswith("|")][2:]
        assert len(told) > 20 and not [row for row in told if "::test_" not in row]


def test_class_weights_beside_missing_labels() -> None:
    """A class's weight is that of its labels: torch's weighted cross-entropy over the labels that are there."""
    torch.manual_seed(0)
    dense = torch.tensor([[0, -1, 2], [1, 1, -1], [-1, -1, -1], [2, 0, 1]])
    a = Annotations.from_dense(dense, num_classes=3)
    scores = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    confusion = torch.randn(3, 3, 3, dtype=torch.float64, requires_grad=True)
    classes = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    h = torch.einsum("ic,rck->irk", scores, confusion)
    wanted = torch.nn.functional.cross_entropy(h.view(-1, 3), dense.view(-1), classes, ignore_index=-1)
    found = F.crowd_cross_entropy(scores, confusion, a, weight=classes[a.label])
    assert_close(found, wanted)
    for ours, theirs in zip(
        torch.autograd.grad(found, (scores, confusion)), torch.autograd.grad(wanted, (scores, confusion)), strict=True
    ):
        assert_close(ours, theirs)


def test_200000_items_of_5000_classes() -> None:
    """Reading, batching and a step: nothing of items x classes, 4 GB in float32, is made."""
    items, classes, annotators = 200_000, 5_000, 50
    generator = torch.Generator().manual_seed(0)
    who, what = (torch.randint(size, (items,), generator=generator) for size in (annotators, classes))
    with Largest() as largest:
        a = Annotations.from_long(
            {"task": torch.arange(items), "worker": who, "label": what}, annotators=annotators, classes=classes
        )
        objective = crowdnal.CrowdLayer(classes, annotators, rank=2)
        batch = a[:32]
        loss = objective(torch.randn(32, classes, requires_grad=True), batch)
        loss.backward()
    assert bool(loss.isfinite()) and largest.elements <= 2 * annotators * classes * 2


def test_747_annotators_take_the_memory_of_their_labels() -> None:
    """50,000 items with three labels each: a megabyte per hundred thousand, where one-hot float64 takes 3 GB."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (150_000,), generator=generator)
    who = torch.randint(747, (150_000,), generator=generator)
    a = Annotations(torch.arange(0, 150_001, 3), who, labels, num_annotators=747, num_classes=10)
    with Largest() as largest:
        data = CrowdDataset(torch.zeros(50_000, 1), a)
        _, batch = collate([data[n] for n in range(256)])
        F.crowd_cross_entropy(torch.zeros(256, 10), torch.zeros(747, 10, 10), batch)
    assert largest.elements <= 747 * 10 * 10


@pytest.mark.parametrize("name", ["crowd-layer", "trace", "conal", "geocrowdnet"])
def test_confusions_are_distributions_after_steps_of_any_length(name: str) -> None:
    """What is trained is no normalised matrix, whose rows a step would break."""
    torch.manual_seed(0)
    objective = crowdnal.objectives.create(name, num_classes=3, num_annotators=4)
    features = torch.randn(6, 5) if objective.needs_features else None
    if features is not None:
        objective.set_feature_dim(5)
    a = Annotations.from_dense(torch.randint(3, (6, 4)), num_classes=3)
    optimizer = torch.optim.Adam(objective.parameters(), lr=0.5)
    before = objective.confusion()
    for _ in range(5):
        optimizer.zero_grad()
        objective(torch.randn(6, 3), a, features).backward()
        optimizer.step()
    after = objective.confusion()
    assert float((after - before).abs().amax()) > 0.05 and bool((after >= 0).all())
    assert_close(after.sum(2), torch.ones(4, 3))
