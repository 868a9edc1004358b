"""The end-to-end objectives of the tables: name in the table, objective, options."""

from __future__ import annotations

from typing import Any

from _tables.training import CLEAN

END_TO_END: list[tuple[str, str, dict[str, Any]]] = [
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
    ("max-mig", "max-mig", {}),
    ("union-net A", "union-net", {"variant": "A"}),
    ("union-net B", "union-net", {"variant": "B"}),
    ("geocrowdnet F", "geocrowdnet", {"volume": "F"}),
    ("geocrowdnet W", "geocrowdnet", {"volume": "W"}),
    ("conal", "conal", {}),
    ("conal probabilities", "conal", {"mixing": "probabilities"}),
    ("conal rank 2", "conal", {"rank": 2}),
    ("conal-em", "conal-em", {}),
]


def options(method: str, given: dict[str, Any], epochs: int) -> dict[str, Any]:
    """With what depends on the length of training."""
    return {**given, "head_epochs": epochs * 3 // 4} if method == "weighted-doctor-net" else given
