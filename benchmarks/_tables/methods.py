"""The objectives of the tables: name in the table, objective, options."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from _tables.training import CLEAN
from crowdnal.objectives import OBJECTIVES

Method = tuple[str, str, dict[str, Any]]
NO_PRIOR: dict[str, Any] = {"confusion_prior": None}  # as in the papers
METHODS: list[Method] = [
    (CLEAN, CLEAN, {}),
    ("majority-vote", "majority-vote", {}),
    ("soft-majority-vote", "soft-majority-vote", {}),
    ("soft-bootstrap", "soft-bootstrap", {"soft": True}),
    ("single-confusion trace", "single-confusion", {"regularizer": "trace", **NO_PRIOR}),
    ("single-confusion frobenius", "single-confusion", {"regularizer": "frobenius", **NO_PRIOR}),
    ("trace", "trace", NO_PRIOR),
    ("trace rank 2", "trace", {"rank": 2}),
    ("crowd-layer", "crowd-layer", NO_PRIOR),
    ("crowd-layer rank 2", "crowd-layer", {"rank": 2}),
    ("crowd-layer-over", "crowd-layer-over", NO_PRIOR),
    ("doctor-net", "doctor-net", {"heads": "separate"}),
    ("weighted-doctor-net", "weighted-doctor-net", {"heads": "separate"}),
    ("max-mig", "max-mig", {"class_prior": "uniform", "init": "votes"}),
    ("union-net A", "union-net", {"variant": "A", "init": "votes"}),
    ("union-net B", "union-net", {"variant": "B", "init": "votes"}),
    ("geocrowdnet F", "geocrowdnet", {"volume": "F", "volume_weight": 0.01, **NO_PRIOR}),
    ("geocrowdnet W", "geocrowdnet", {"volume": "W", "volume_weight": 0.01, **NO_PRIOR}),
    ("conal", "conal", NO_PRIOR),
    ("conal probabilities", "conal", {"mixing": "probabilities", **NO_PRIOR}),
    ("conal rank 2", "conal", {"rank": 2}),
    ("conal-em", "conal-em", {}),
    ("dl-ds", "dl-ds", {}),
    ("dl-em", "dl-em", {}),
    ("dl-em incremental", "dl-em", {"incremental": True}),
    ("dl-wc", "dl-wc", {"num_clusters": 3}),
    ("mbem", "mbem", {"soft": False, "confusion_prior": None}),
    ("cmm", "cmm", {"laplace": True}),
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
