"""The objectives of the tables: name in the table, objective, options."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from _tables.training import CLEAN
from crowdnal.objectives import OBJECTIVES

Method = tuple[str, str, dict[str, Any]]
METHODS: list[Method] = [
    (CLEAN, CLEAN, {}),
    ("majority-vote", "majority-vote", {}),
    ("soft-majority-vote", "soft-majority-vote", {}),
    ("soft-bootstrap", "soft-bootstrap", {}),
    ("single-confusion trace", "single-confusion", {"regularizer": "trace"}),
    ("single-confusion frobenius", "single-confusion", {"regularizer": "frobenius"}),
    ("trace", "trace", {}),
    ("trace rank 2", "trace", {"rank": 2}),
    ("crowd-layer", "crowd-layer", {}),
    ("crowd-layer rank 2", "crowd-layer", {"rank": 2}),
    ("crowd-layer-over", "crowd-layer-over", {}),
    ("doctor-net", "doctor-net", {}),
    ("weighted-doctor-net", "weighted-doctor-net", {}),
    ("max-mig", "max-mig", {"class_prior": "uniform"}),
    ("union-net A", "union-net", {"variant": "A"}),
    ("union-net B", "union-net", {"variant": "B"}),
    ("geocrowdnet F", "geocrowdnet", {"volume": "F"}),
    ("geocrowdnet W", "geocrowdnet", {"volume": "W"}),
    ("conal", "conal", {}),
    ("conal probabilities", "conal", {"mixing": "probabilities"}),
    ("conal rank 2", "conal", {"rank": 2}),
    ("conal-em", "conal-em", {}),
    ("dl-ds", "dl-ds", {}),
    ("dl-em", "dl-em", {}),
    ("dl-em incremental", "dl-em", {"incremental": True}),
    ("dl-wc", "dl-wc", {}),
    ("mbem", "mbem", {"soft": False, "confusion_prior": None}),
    ("cmm", "cmm", {}),
]
ELSEWHERE = ("dl-aggregate", "lia")  # in tables of their own
METHODS += [(n, n, {}) for n in OBJECTIVES if n not in (*ELSEWHERE, *(name for _, name, _ in METHODS))]


def options(method: str, given: dict[str, Any], epochs: int) -> dict[str, Any]:
    """With what depends on the length of training."""
    return {**given, "head_epochs": epochs * 3 // 4} if method == "weighted-doctor-net" else given


def wanted(names: Sequence[str] | None, more: Sequence[Method] = ()) -> list[Method]:
    """Those of the tables, ``more`` among them, or the named ones."""
    methods = [*METHODS, *more]
    if names is None:
        return methods
    if unknown := set(names) - {label for label, _, _ in methods}:
        sys.exit(f"unknown methods {sorted(unknown)}: choose from {', '.join(label for label, _, _ in methods)}")
    return [method for method in methods if method[0] in names]
