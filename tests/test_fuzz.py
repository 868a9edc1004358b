"""A few seconds of `tests/fuzz.py`, whose long run is a script: each case gives a right result or an error of ours."""

from __future__ import annotations

import pytest
from support.fuzz import LAYERS, Case, case_of, fault

CASES = {"ops": 150, "functional": 120, "objectives": 30, "aggregators": 40, "readers": 150, "files": 150}


@pytest.mark.parametrize("layer", LAYERS)
def test_malformed_and_extreme_input(layer: str) -> None:
    for number in range(CASES[layer]):
        case = case_of(layer, 0, number)
        wrong = fault(case)
        assert wrong is None, (
            f"case {number}: {case.what}: {wrong} (python tests/fuzz.py --layers {layer} --only {number})"
        )


def test_a_fault_is_seen() -> None:
    """Somebody else's exception, and a wrong result."""
    assert fault(Case("", lambda: {}["x"])) == "KeyError: 'x'"
    assert fault(Case("", lambda: "garbage")) == "garbage"
    assert fault(Case("", lambda: None)) is None
