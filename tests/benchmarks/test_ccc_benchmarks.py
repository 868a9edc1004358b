"""The benchmarks of CCC: the forms compared compute the same, the simulated annotators are as the paper says."""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FORMS = {"exact", "finite_difference", "head", "create_graph", "create_graph, one forward pass"}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)
    for name in [name for name in sys.modules if name.split(".")[0] in ("_tables", "_training", "_machine")]:
        sys.modules.pop(name)


@pytest.mark.slow
def test_rows_of_the_cost(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    script = [sys.executable, str(BENCHMARKS / "training.py"), "ccc", "--quick", "--threads", "1", "--json", str(file)]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    rows = {row["form"]: row for row in found["rows"]}
    assert set(rows) == FORMS and found["quick"]
    assert all(row["plain_steps"] > 0 and row["plain_steps_processor_time"] > 0 for row in rows.values())
    peaks = {form: row["peak_bytes"] for form, row in rows.items()}
    assert found["plain"]["peak_bytes"] <= peaks["head"] < peaks["exact"] < peaks["create_graph"]


@pytest.mark.slow
def test_rows_of_the_overhead(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ["overhead", "--quick", "--threads", "1", "--json", str(file)]
    done = subprocess.run([sys.executable, str(BENCHMARKS / "training.py"), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    kept = json.loads((BENCHMARKS / "results" / "overhead-cpu.json").read_text())
    assert [row["objective"] for row in found["rows"]] == [row["objective"] for row in kept["rows"]]
    assert all(row["seconds"] > found["plain"]["cross_entropy_seconds"] > 0 for row in kept["rows"])
    assert all(row["overhead"] <= row["target"] for row in kept["rows"]) and not kept["quick"]


def test_every_form_takes_the_same_step(modules: Any) -> None:
    benchmark = modules("_training.ccc")
    ends = {}
    for form in ("exact", "create_graph", "create_graph, one forward pass", "finite_difference"):
        step = benchmark.make("test_resnet", 8, 32)[form]
        model = next(c.cell_contents for c in step.__closure__ if isinstance(c.cell_contents, torch.nn.Module))
        start = copy.deepcopy(model.state_dict())
        step()
        ends[form] = model.state_dict()
    moved = {name: (ends["exact"][name] - start[name]).float().norm() for name in start}
    for form, tolerance in {
        "create_graph": 1e-3,
        "create_graph, one forward pass": 1e-3,
        "finite_difference": 0.05,
    }.items():
        for name, size in moved.items():
            assert (ends[form][name] - ends["exact"][name]).float().norm() <= tolerance * size + 1e-7, (form, name)


def test_digits_rows(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table = modules("_tables.ccc")
    monkeypatch.setattr(table, "CROWDS", ((10, (1,)),))
    rows = table.digits(1, quick=True)
    assert len(rows) == 8 and {row["method"] for row in rows} == {
        "crowd-layer", "conal", "crowd-layer, two networks", "ccc"
    }  # fmt: skip
    assert all(0 <= row["mean"] <= 1 and row["metric"] == "accuracy_last" for row in rows)
    assert len({(row["method"], row["setting"]) for row in rows}) == len(rows)
