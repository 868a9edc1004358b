"""EM on crowds without information, and with numbers at the edges: distributions, or an error that says what to do."""

from __future__ import annotations

import pytest
import torch

from crowdnal import aggregation
from crowdnal.data import Annotations

METHODS = ("dawid_skene", "one_coin", "mmce", "worker_clustering", "conal_em")


def crowd(rows: list[tuple[int, int, int]], items: int, annotators: int, classes: int = 2, weight=None) -> Annotations:
    rows = sorted(rows)
    counts = torch.bincount(torch.tensor([i for i, _, _ in rows], dtype=torch.long), minlength=items)
    indptr = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    weight = None if weight is None else torch.full((len(rows),), weight, dtype=torch.float64)
    who, label = [r for _, r, _ in rows], [y for _, _, y in rows]
    return Annotations(indptr, who, label, num_annotators=annotators, num_classes=classes, weight=weight)


UNANIMOUS = [(i, r, i % 2) for i in range(8) for r in range(3)]
CROWDS = {
    "one label per worker": ([(i, 3 * i + r, (i + (r + i % 3 == 2)) % 2) for i in range(8) for r in range(3)], 8, 24),
    "unanimous": (UNANIMOUS, 8, 3),
    "disconnected": ([(i, r + 3 * (i // 4), i % 2) for i in range(8) for r in range(3)], 8, 6),
    "two who always disagree": ([(i, r, (i + r) % 2) for i in range(8) for r in range(2)], 8, 2),
    "a class that nobody chose": ([(i, r, 0) for i in range(8) for r in range(3)], 8, 3),
}  # fmt: skip


def posterior(method: str, a: Annotations) -> torch.Tensor:
    options = {"worker_clustering": {"num_clusters": 1}, "mmce": {"max_iterations": 3}}.get(method, {})
    found = getattr(aggregation, method)(a, **options).posterior
    assert bool((found >= 0).all()) and bool(((found.sum(1) - 1).abs() < 1e-9).all())
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", CROWDS)
def test_crowds_without_information(method: str, kind: str) -> None:
    rows, items, annotators = CROWDS[kind]
    found = posterior(method, crowd(rows, items, annotators))
    if kind in ("unanimous", "disconnected"):
        assert found.argmax(1).tolist() == [i % 2 for i in range(items)]
    if kind == "a class that nobody chose":
        assert found.argmax(1).tolist() == [0] * items


@pytest.mark.parametrize("method", METHODS)
def test_weights_at_the_edges(method: str) -> None:
    """0 says nothing, 1e6 is a million labels; what overflows is refused."""
    plain = posterior(method, crowd(UNANIMOUS, 8, 3)).argmax(1)
    assert posterior(method, crowd(UNANIMOUS, 8, 3, weight=1e6)).argmax(1).equal(plain)
    posterior(method, crowd(UNANIMOUS, 8, 3, weight=0.0))
    with pytest.raises(ValueError, match="divide all weights by one number"):
        getattr(aggregation, method)(crowd(UNANIMOUS, 8, 3, weight=1e308))


@pytest.mark.parametrize("method", METHODS)
def test_nobody_and_nothing(method: str) -> None:
    """Neither items nor annotators; without classes the error says so, from no C++ header."""
    for items, annotators in ((0, 0), (0, 1), (2, 0), (2, 1)):
        options = {"num_clusters": 1} if method == "worker_clustering" else {}
        found = getattr(aggregation, method)(crowd([], items, annotators, 3), **options)
        assert found.posterior.shape == (items, 3)
        with pytest.raises(ValueError, match="annotations have no classes"):
            getattr(aggregation, method)(crowd([], items, annotators, 0), **options)


@pytest.mark.parametrize("method", METHODS)
def test_options_of_another_type_are_named(method: str) -> None:
    a = crowd(UNANIMOUS, 8, 3)
    for option, value in (("max_iterations", "3"), ("max_iterations", 2.5), ("tolerance", [1]), ("dtype", "float64")):
        with pytest.raises(ValueError, match=f"{option}=.* must be"):
            getattr(aggregation, method)(a, **{option: value})
