"""benchmarks/crossfit.py on one tiny crowd."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest


def test_its_table_is_printed_and_written(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    crossfit, robust = importlib.import_module("crossfit"), importlib.import_module("robust")
    tiny = {"tiny": (2, 60, 10, 3, 0.7, 0.9, "even")}
    monkeypatch.setattr(robust, "SIMULATED", tiny)
    monkeypatch.setattr(crossfit, "SIMULATED", tiny)
    short = {name: variant._replace(epochs=2) for name, variant in crossfit.VARIANTS.items()}
    monkeypatch.setattr(crossfit, "VARIANTS", short)
    monkeypatch.delenv("CROWDNAL_DATA", raising=False)
    path = tmp_path / "found.json"
    names = ["clean labels", "dl-em", "feature-em, crossed"]
    monkeypatch.setattr(sys, "argv", ["crossfit.py", "--seeds", "1", "--json", str(path), "--variants", *names])
    crossfit.main()
    printed, found = capsys.readouterr().out, json.loads(path.read_text())
    assert f"| crowd | {' | '.join(names)} |" in printed and "| tiny | " in printed
    assert set(found["tiny"]) == set(names) and 0 <= found["tiny"]["dl-em"]["test"][0] <= 1
    assert 0 <= found["tiny"]["feature-em, crossed"]["labels"][0] <= 1 and "labels" not in found["tiny"]["clean labels"]


@pytest.mark.parametrize("crossed", [True, False])
def test_a_variant_is_trained_as_it_says(monkeypatch, crossed):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    crossfit, robust = importlib.import_module("crossfit"), importlib.import_module("robust")
    made = []
    monkeypatch.setattr(crossfit, "CrossFit", lambda *a, **o: made.append(o) or crossfit.crowdnal.CrossFit(*a, **o))
    crossfit.accuracies(robust._drawn("good, 2 classes", 0), crossfit.Variant("dl-em", {}, crossed, 1), 0, False)
    assert made == ([{"folds": 5, "seed": 0}] if crossed else [])
