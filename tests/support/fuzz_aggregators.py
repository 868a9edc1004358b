"""Cases of aggregation and metrics: degenerate crowds, and options that make no sense."""

from __future__ import annotations

import inspect
import random
from typing import Any

import torch

from crowdnal import aggregation, metrics
from crowdnal.data import Annotations
from support.fuzz import Case

METHODS = ("dawid_skene", "conal_em", "one_coin", "mmce", "worker_clustering", "majority-vote")
NONSENSE: tuple[Any, ...] = (-1, 0, 1, 2.5, 1e30, float("nan"), "x", None, [], [0, 1], torch.ones(2, 2), torch.zeros(0))
MEASURES = ("reliability", "spammer_score", "confusion_error", "confusion_divergence", "reliability_correlation")


def case(rng: random.Random) -> Case:
    """A method on a crowd, or a measure of what may be no confusions."""
    if rng.random() < 0.3:
        return _measure(rng)
    what, a = crowd(rng)
    method, options = rng.choice(METHODS), {"max_iterations": 3}
    if method == "majority-vote":
        return Case(f"{method} of {what}", lambda: _distributions(aggregation.aggregate(a, method)))
    function = getattr(aggregation, method)
    if rng.random() < 0.4:
        names = [p for p, q in inspect.signature(function).parameters.items() if q.kind is q.KEYWORD_ONLY]
        options[rng.choice(names)] = rng.choice(NONSENSE)
    return Case(f"{method}({options}) of {what}", lambda: _distributions(function(a, **options).posterior))


def crowd(rng: random.Random) -> tuple[str, Annotations]:
    """Of any shape: nobody, nothing, one label per worker, unanimous, who always disagree."""
    items, annotators, classes = rng.choice((0, 1, 2, 7, 40)), rng.choice((0, 1, 2, 9)), rng.choice((0, 1, 2, 3, 12))
    kind = rng.choice(("random", "unanimous", "opposite", "one each", "none"))
    counts = [rng.choice((0, 1, 2, 3, 8)) if kind != "none" and annotators * classes else 0 for _ in range(items)]
    nnz = sum(counts)
    who = [rng.randrange(annotators) for _ in range(nnz)]
    label = [rng.randrange(classes) for _ in range(nnz)]
    if kind == "unanimous":
        label = [0] * nnz
    elif kind == "opposite":
        label = [r % classes for r in who]
    elif kind == "one each" and nnz:
        annotators, who = nnz, list(range(nnz))
    weight = None
    if rng.random() < 0.4:
        sizes = rng.choice(([1.0], [0.0], [0.0, 1.0], [1e6], [1e-30, 1.0], [1e300, 1.0], [3e38], [1e-300]))
        weight = torch.tensor([rng.choice(sizes) for _ in range(nnz)], dtype=torch.float64)
    indptr = [0, *torch.tensor(counts).cumsum(0).tolist()]
    a = Annotations(indptr, who, label, num_annotators=annotators, num_classes=classes, weight=weight)
    weights = None if weight is None else sorted(set(weight.tolist()))
    return f"{kind}, {items} items {counts[:9]}, {annotators} annotators, {classes} classes, weights {weights}", a


def _distributions(posterior: Any) -> str | None:
    """None if the rows sum to 1."""
    bad = ~((posterior >= 0).all(1) & ((posterior.double().sum(1) - 1).abs() < 1e-4))
    empty = posterior.shape[1] == 0
    return None if empty or not bool(bad.any()) else f"row {int(bad.nonzero()[0])} is {posterior[bad][0].tolist()[:6]}"


def _measure(rng: random.Random) -> Case:
    name = rng.choice(MEASURES)
    pair = name in ("confusion_error", "confusion_divergence", "reliability_correlation")
    given, what = [], []
    for _ in range(1 + pair):
        sizes = [rng.choice((0, 1, 2, 3)) for _ in range(rng.choice((0, 1, 2, 3, 3, 3, 3)))]
        good = torch.rand(sizes).softmax(-1) if sizes else torch.tensor(0.5)
        kind = rng.choice(("right", "right", "negative", "nan", "huge", "integer", "list"))
        value: Any = {"negative": -good, "nan": good * float("nan"), "huge": good * 1e30, "integer": good.long()}.get(
            kind, good
        )
        given.append(value.tolist() if kind == "list" else value)
        what.append(f"{kind} {sizes}")
    return Case(f"{name} of {' and '.join(what)}", lambda: _inside(name, getattr(metrics, name)(*given)))


def _inside(name: str, value: Any) -> str | None:
    value = torch.as_tensor(value, dtype=torch.float64)
    low, high = {"confusion_error": (0, 2), "reliability_correlation": (-1, 1)}.get(name, (0, 1))
    nan = bool(value.isnan().any())
    if name == "reliability_correlation" and nan:
        return None  # not defined: one annotator, or all equal
    outside = bool(((value < low - 1e-9) | (value > high + 1e-9)).any())
    return f"gives {value.tolist()}" if nan or outside else None
