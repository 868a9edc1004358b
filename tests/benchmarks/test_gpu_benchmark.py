"""The benchmark of the GPU, tried on the CPU: it checks, measures, writes what it says, and keeps to its minutes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
KEYS = {
    *("op", "cell", "formulation", "milliseconds", "ratio_to_ours", "share_of_copy", "memory_bound"),
    *("peak_extra_bytes", "skipped"),
}
QUICK = ["--device", "cpu", "--quick", "--ops", "softplus"]
TRAINED = {"overhead": 0.005, "plain_milliseconds": 1.0, "head_milliseconds": 1.005, "skipped": None}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, of which no model is trained."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    monkeypatch.setattr(gpu, "train_both", lambda *_: TRAINED)
    return gpu


def run(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, file: Path, *options: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *QUICK, "--json", str(file), *options])
    gpu.main()
    return json.loads(file.read_text())


@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *QUICK, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert written["machine"]["copy_gb_per_s"] > 0 and written["geometric_mean_ratio"]["crowd_mixture_nll softplus"] > 0
    assert not written["unfinished"] and len(written["checks"]) == 9
    assert {check["dtype"] for check in written["checks"]} == {"float32", "bfloat16", "float16"}
    assert [row["formulation"] for row in written["rows"]][0] == "crowdnal"
    for row in written["rows"]:
        assert set(row) == KEYS
        assert (row["milliseconds"] is None) == (row["skipped"] is not None)
    (model,) = written["training"]
    assert model["model"] == "resnet18"
    ratio = model["head_milliseconds"] / model["plain_milliseconds"]
    assert abs(model["overhead"] - (ratio - 1)) < 1e-9
    assert "crowd_mixture_nll softplus" in done.stdout and "tiny" in done.stdout
    ratios = written["targets"]["ratio"]
    assert len(ratios["met"] | ratios["missed"]) == 1 and "meet it" in done.stdout


def test_unknown_cells_are_refused(gpu, monkeypatch, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(gpu, monkeypatch, tmp_path / "gpu.json", "--cells", "none")
    assert "unknown cells none" in capsys.readouterr().err


@pytest.mark.slow
def test_the_minutes_break_off_what_is_under_way(gpu, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(gpu, "check", lambda *_: {"wrong": None})
    monkeypatch.setattr(gpu, "measure_all", lambda *_: time.sleep(60))
    start = time.monotonic()
    written = run(gpu, monkeypatch, tmp_path / "gpu.json", "--minutes", "0.1")
    assert time.monotonic() - start < 30 and "out of time" in capsys.readouterr().err
    assert written["unfinished"] and written["training"][0]["overhead"] == 0.005 and written["rows"] == []


def fail(*_: object) -> None:
    raise RuntimeError("out of everything\nsecond line")


def test_parts_that_fail_are_told_and_the_others_kept(gpu, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(gpu, "train_both", fail)
    monkeypatch.setattr(gpu, "measure_all", fail)
    written = run(gpu, monkeypatch, tmp_path / "gpu.json")
    (row,), (model,) = written["rows"], written["training"]
    assert row["skipped"] == model["skipped"] == "RuntimeError: out of everything" and set(row) == KEYS
    assert written["geometric_mean_ratio"] == {"crowd_mixture_nll softplus": None} and not written["unfinished"]
    assert capsys.readouterr().out.count("was not measured: RuntimeError: out of everything") == 2


def test_no_part_is_begun_that_would_not_end(gpu, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(gpu, "check", lambda *_: {"wrong": None})
    monkeypatch.setattr(gpu.Clock, "left", lambda _: 11.0)
    argv = [
        "gpu.py",
        "--device",
        "cpu",
        "--cells",
        "labelme",
        "--ops",
        "softplus",
        "--json",
        str(tmp_path / "gpu.json"),
    ]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(gpu, "measure_all", fail)
    gpu.main()
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert {part["skipped"] for part in written["rows"] + written["training"]} == {"no time was left"}
    assert [row["formulation"] for row in written["rows"]] == ["crowdnal", "fastest other, compiled"]


def test_a_crash_leaves_what_was_measured(gpu, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(gpu, "measure_all", lambda *_: {}["a mistake"])
    with pytest.raises(KeyError, match="a mistake"):
        run(gpu, monkeypatch, tmp_path / "gpu.json")
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["unfinished"] and written["training"][0]["overhead"] == 0.005


def test_a_wrong_result_ends_the_run(gpu, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(gpu, "difference", lambda *_: 0.5)
    with pytest.raises(SystemExit, match="softplus tiny float32 first: crowd_mixture_nll softplus tiny float32 by 5"):
        run(gpu, monkeypatch, tmp_path / "gpu.json")
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert "rows" not in written and len(written["checks"]) == 9 and all(check["wrong"] for check in written["checks"])
    assert written["first_failure"] == "crowd_mixture_nll softplus tiny float32: by 5.0e-01"


def lost(*_: object) -> None:
    raise RuntimeError("CUDA error: an illegal memory access")


def test_a_device_that_is_lost_is_told_with_the_op_that_lost_it(gpu, monkeypatch, tmp_path, capsys) -> None:
    """Whatever fails after it, the making of a problem on the device at first."""
    made, problem = [], gpu.DeviceProblem

    def breaks(*given: Any) -> Any:
        made.append(given)
        if len(made) > 4:  # the second check
            lost()
        return problem(*given)

    monkeypatch.setattr(gpu, "DeviceProblem", breaks)
    monkeypatch.setattr(gpu, "synchronize", lost)
    with pytest.raises(SystemExit, match="softplus tiny float16 first"):
        run(gpu, monkeypatch, tmp_path / "gpu.json")
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [check["wrong"] is None for check in written["checks"]] == [True, True, False]
    assert written["first_failure"].startswith("crowd_mixture_nll softplus tiny float16: RuntimeError: CUDA error")
    assert "nothing more is checked" in written["first_failure"] and "the first to fail" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["copy_rate", "describe", "empty_cache", "measure_all"])
def test_the_file_is_written_whatever_fails(gpu, monkeypatch, tmp_path, part) -> None:
    monkeypatch.setattr(gpu, "synchronize", lost)
    monkeypatch.setattr(gpu, part, lost)
    with pytest.raises((RuntimeError, SystemExit), match="illegal memory access"):
        run(gpu, monkeypatch, tmp_path / "gpu.json")
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert len(written["checks"]) == 9 and "illegal memory access" in written["first_failure"]


@pytest.mark.slow
def test_smoke_is_the_checks_of_every_op_and_then_a_small_cell_of_each(gpu, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--smoke", "--json", str(tmp_path / "gpu.json")])
    start = time.monotonic()
    gpu.main()
    assert time.monotonic() - start < 110
    written = json.loads((tmp_path / "gpu.json").read_text())
    names = {op.name for op in gpu.OPS}
    assert {"mix", "label_log_likelihood", "em_step", "select"} < names
    assert {check["op"] for check in written["checks"]} == {row["op"] for row in written["rows"]} == names
    assert not written["unfinished"] and written["first_failure"] is None and written["training"] == []
    assert not [row["skipped"] for row in written["rows"] if row["skipped"] and "crowd-kit" not in row["formulation"]]
    told = capsys.readouterr().err
    assert told.index(f"{len(written['checks'])} checks against the CPU: all right") < told.index("s left")


def test_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _targets

    def row(cell: str, formulation: str, milliseconds: float, share: float, ratio: float = 1.0) -> dict[str, Any]:
        values = {"milliseconds": milliseconds, "share_of_copy": share, "ratio_to_ours": ratio, "memory_bound": True}
        return {"op": "op", "cell": cell, "formulation": formulation, **values}

    def cell(name: str, milliseconds: float, share: float, ratio: float) -> list[dict[str, Any]]:
        ours = row(name, _targets.OURS, 1.0, 0.01), row(name, _targets.GRAPH, milliseconds, share)
        return [*ours, row(name, "slow", 2 * ratio, 0.1, 2 * ratio), row(name, "dense", ratio, 0.1, ratio)]

    rows = [*cell("good", 0.2, 0.6, 3.0), *cell("bad", 0.2, 0.5, 2.9), *cell("short", 0.1, 0.1, 8.0)]
    rows += [row("alone", _targets.OURS, 1.0, 0.1)]
    training = [{"model": "resnet50", "overhead": 0.02}, {"model": "vit", "overhead": 0.5}]
    found = _targets.judge(rows, training)
    assert found["share_of_copy"]["met"] == {"op, good": 0.6} and found["share_of_copy"]["missed"] == {"op, bad": 0.5}
    assert set(found["ratio"]["met"]) == {"op, good", "op, short"} and found["ratio"]["missed"] == {"op, bad": 2.9}
    assert found["overhead"]["met"] == {} and found["overhead"]["missed"] == {"resnet50": 0.02}
    assert _targets.ratios_of([row("alone", _targets.OURS, 1.0, 0.1)]) == {"op": None}
