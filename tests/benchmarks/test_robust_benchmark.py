"""benchmarks/robust.py on one tiny crowd."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest


@pytest.fixture
def robust(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("robust")


@pytest.mark.parametrize("what", ["labels", "training", "epochs", "compare"])
def test_each_table_is_printed_and_written(robust, what, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(robust, "SIMULATED", {"tiny": (2, 60, 10, 3, 0.7, 0.9, "even")})
    monkeypatch.delenv("CROWDNAL_DATA", raising=False)
    method = "dawid-skene" if what == "labels" else "dl-ds"
    path = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["robust.py", what, "--methods", method, "--seeds", "1", "--json", str(path)])
    robust.main()
    printed, found = capsys.readouterr().out, json.loads(path.read_text())
    if what == "compare":
        assert found["tiny"]["taken"] in (method, "majority-vote") and 0.5 < found["tiny"]["accuracy"][method] <= 1
        assert f"| crowd | majority-vote | {method} | taken |" in printed and "| tiny |" in printed
    else:
        rows = [f"{method}, {kept} epoch" for kept in ("last", "chosen")] if what == "epochs" else [method]
        assert list(found) == rows and "below -.01" in printed
        for row in rows:
            assert len(found[row]["tiny"]) == 1 and -0.5 < found[row]["tiny"][0] < 0.5 and f"| {row} |" in printed


def test_hard_items_are_taken_for_the_class_that_they_look_like(robust):
    """Half of the items have nearly all mistakes, most of an item's are the same, and annotators are alike in that."""
    _, a, truth, _, _ = robust.simulated("hard items", 0)
    wrong = a.votes().scatter(1, truth.unsqueeze(1), 0.0)
    shares = (wrong.sum(1) / a.counts).sort().values
    assert shares[300:].mean() > 2.5 * shares[:300].mean() and 0.4 < shares[300:].mean() < 0.6
    several = wrong.sum(1) > 1
    assert (wrong.max(1).values / wrong.sum(1))[several].mean() > 0.8


def test_the_most_frequent_of_uneven_classes_is_not_always_the_first(robust):
    most = {int(robust.simulated("uneven classes", seed)[2].bincount(minlength=4).argmax()) for seed in range(5)}
    assert len(most) > 1


def test_what_is_below_the_votes_beyond_noise_is_told(robust):
    found = {"a": {"x": [-0.02, -0.04, -0.03], "y": [0.2]}, "b": {"x": [-0.1, 0.0, 0.04], "y": [0.0]}}
    rows = {row.split(" | ")[0]: row.split(" | ")[1:] for row in robust.table(found).splitlines()}
    assert rows["| a"] == ["+85.0", "-30", "1/2", "1", "-30 ± 6", "+200 |"]
    assert rows["| b"] == ["-10.0", "-20", "1/2", "0", "-20 ± 42", "+0 |"]
