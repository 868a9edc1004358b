"""EM on crowds without information, and with numbers at the edges: distributions, or an error that says what to do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.compare import assert_close

from crowdnal import aggregation, simulation
from crowdnal.aggregation import vote_proportions
from crowdnal.data import Annotations

METHODS = ("dawid_skene", "one_coin", "mmce", "worker_clustering", "conal_em", "ibcc", "ebcc", "cbcc", "bwa")


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
    "one label per item": ([(i, i % 3, i * 7 % 5 % 2) for i in range(30)], 30, 3),
    "one label per item and worker": ([(i, i, i * 7 % 5 % 2) for i in range(30)], 30, 30),
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
    if kind.startswith("one label per item") and method != "conal_em":
        assert found.argmax(1).tolist() == [y for _, _, y in rows]
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


@pytest.mark.parametrize("method", [name for name in METHODS if name != "mmce"])
def test_one_label_an_item_stays_the_votes(method: str) -> None:
    """Nothing tells how often it is right; Bayesian combination made one class of 400 items, 485 thousandths below."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(4, (400,), generator=generator)
    rates = 0.6 + 0.3 * torch.rand(20, generator=generator)
    a = simulation.simulate(truth, simulation.symmetric_confusions(20, 4, rates), annotations_per_item=1)
    votes = a.votes().argmax(1)
    if method == "conal_em":
        assert aggregation.conal_em(a, omega="annotator").posterior.argmax(1).equal(votes)
        with pytest.warns(UserWarning, match="no item has two labels"):
            aggregation.conal_em(a)
    else:
        assert getattr(aggregation, method)(a).posterior.argmax(1).equal(votes)


@pytest.mark.parametrize("method", ["ibcc", "ebcc", "cbcc"])
def test_single_labels_inform_no_annotator(method: str) -> None:
    """Confusions and class prior are those without them, and their posterior is the E-step's."""
    generator = torch.Generator().manual_seed(1)
    truth = torch.randint(3, (120,), generator=generator)
    a = simulation.simulate(truth, simulation.symmetric_confusions(6, 3, 0.7), annotations_per_item=3)
    first = torch.zeros(a.num_annotations, dtype=torch.bool)
    first[a.indptr[:-1]] = True
    some = a.select(first | (a.item < 80))
    both, without = (getattr(aggregation, method)(given) for given in (some, a.select(a.item < 80)))
    for name in ("confusion", "class_prior"):
        assert_close(getattr(both, name), getattr(without, name), where=name)
    assert both.lower_bound == without.lower_bound
    assert_close(both.posterior[:80], without.posterior[:80])
    assert both.posterior[80:].argmax(1).equal(some.votes()[80:].argmax(1))


COLLAPSING: dict[str, dict[str, Any]] = {"dawid_skene": {"confusion_prior": None, "smoothing": 1.0}, "conal_em": {}}


@pytest.mark.parametrize("method", COLLAPSING)
def test_a_collapse_is_said(method: str) -> None:
    """Maximum likelihood where everybody labels once: all is one class, and a warning names what to use."""
    generator = torch.Generator().manual_seed(3)
    truth = (torch.arange(60) % 2).repeat_interleave(3)
    label = torch.where(torch.rand(180, generator=generator) < 0.9, truth, 1 - truth)
    a = Annotations(torch.arange(0, 181, 3), torch.arange(180), label, num_annotators=180, num_classes=2)
    with pytest.warns(UserWarning, match=rf"{method} makes every item class \d, .* Use aggregate") as said:
        found = getattr(aggregation, method)(a, **COLLAPSING[method])
    assert len(found.posterior.argmax(1).unique()) == 1
    assert [str(warning.filename) for warning in said] == [__file__]


@pytest.mark.parametrize("method", METHODS)
def test_no_collapse_is_said_where_there_is_none(method: str) -> None:
    """Everything is one class by the votes, too; nothing is labelled; votes are tied."""
    crowds = [crowd(*CROWDS[kind]) for kind in ("unanimous", "a class that nobody chose", "two who always disagree")]
    nobody = crowd([], 3, 1)
    assert vote_proportions(nobody, 2).tolist() == [[0.5, 0.5]] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for a in (*crowds, nobody):
            options = {"num_clusters": 1} if method == "worker_clustering" else {}
            getattr(aggregation, method)(a, **options)
