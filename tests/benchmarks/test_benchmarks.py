"""The kernel benchmark: what it writes is consistent, its measure of memory sees memory, nothing wrong is timed."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NUMBERS = ("milliseconds", "ratio_to_ours", "share_of_peak", "times_limit", "peak_extra_bytes")
LIMIT = ("empty_milliseconds", "limit_milliseconds")
KEYS = {"op", "cell", "formulation", *NUMBERS, *LIMIT, "skipped", "cores_busy_elsewhere"}
PEAK = {"copy_gb_per_s": 10.0, "fp32_gflop_per_s": 100.0}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module("kernels")
    torch.set_num_threads(threads)
    for name in ("kernels", "_formulations", "_joint", "_limit", "_machine", "_mixture", "_pairs", "_softmax"):
        sys.modules.pop(name)


def arguments(**changes: Any) -> argparse.Namespace:
    usual = {"quick": True, "compile": False, "memory_gb": 8.0, "step_seconds": 10.0, "torch_dtype": torch.float32}
    return argparse.Namespace(**usual | changes)


@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    script = [sys.executable, str(BENCHMARKS / "kernels.py")]
    options = ["--quick", "--cells", "tiny", "--ops", "softplus", "--no-compile", "--threads", "1", "--markdown"]
    done = subprocess.run([*script, *options, "--json", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| 16, 5, 3, 2 |" in done.stdout
    written = json.loads(file.read_text())
    rows = written["rows"]
    assert {row["op"] for row in rows} == {"crowd_mixture_nll softplus"}
    assert {row["cell"] for row in rows} == {"tiny"}
    names = [row["formulation"] for row in rows]
    assert names[0] == "crowdnal" and len(names) == len(set(names))
    assert set(names) == {"crowdnal", "dense", "gather matrices + bmm", "gather rows"}
    for row in rows:
        assert set(row) == KEYS
        assert row["cores_busy_elsewhere"] >= 0
        if row["skipped"]:
            assert all(row[name] is None for name in NUMBERS)
            continue
        assert row["milliseconds"] > 0 and row["peak_extra_bytes"] > 0
        assert row["ratio_to_ours"] == pytest.approx(row["milliseconds"] / rows[0]["milliseconds"])
        # what is needed is a property of op and cell, so the share falls as the time grows
        assert row["share_of_peak"] * row["ratio_to_ours"] == pytest.approx(rows[0]["share_of_peak"])
        needed = row["share_of_peak"] * row["milliseconds"]  # the time of bytes or operations
        assert row["limit_milliseconds"] == pytest.approx(row["empty_milliseconds"] + needed) and needed > 0
        assert row["times_limit"] == pytest.approx(row["milliseconds"] / row["limit_milliseconds"])
    assert written["geometric_mean_times_limit"]["all"] == pytest.approx(rows[0]["times_limit"])
    best = min(row["ratio_to_ours"] for row in rows[1:] if not row["skipped"])
    assert written["geometric_mean_ratio"]["all"] == pytest.approx(best)
    assert {"processor", "cores", "threads", "torch", "backend", *PEAK} <= set(written["machine"])
    assert all(written["machine"][name] > 0 for name in PEAK)


@pytest.mark.slow
def test_every_op_in_a_tiny_cell(kernels: ModuleType) -> None:
    for op in kernels.OPS:
        rows = kernels.measure(op, kernels.TINY, arguments(torch_dtype=torch.float64), PEAK)
        timed = {row["formulation"] for row in rows if row["milliseconds"]}
        assert timed >= {"crowdnal", *(f.name for f in op.others if not f.name.startswith("crowd-kit"))}


@pytest.mark.slow
def test_the_fastest_is_compiled_and_nothing_is_silent(kernels: ModuleType) -> None:
    options = arguments(compile=True, cells=[kernels.TINY], ops=kernels.OPS[:1])
    rows = {row["formulation"]: row for row in kernels.measure(kernels.OPS[0], kernels.TINY, options, PEAK)}
    eager = {name: rows[name]["milliseconds"] for name in ("dense", "gather + bmm")}
    assert all(time > 0 for time in eager.values())
    compiled = [rows[f"{name}, compiled"] for name in eager]
    quick = [row for row in compiled if "--quick" in (row["skipped"] or "")]
    (tried,) = (row for row in compiled if row not in quick)
    assert len(quick) == 1 and (tried["milliseconds"] or tried["skipped"].startswith("torch.compile failed"))


def test_the_empty_function_has_the_tensors_of_our_step_and_computes_nothing(kernels: ModuleType) -> None:
    for op in kernels.OPS:
        problem = kernels.Problem(kernels.TINY, op.leaves, torch.float32)
        ours = op.ours(problem)
        output = ours().detach()
        empty = kernels.empty_step(ours, problem, output)
        a = problem.annotations
        given = [id(tensor) for tensor in empty.arguments[1:]]
        assert len(given) == len(set(given))
        assert {id(t) for t in (*ours.leaves, a.indptr, a.item, a.annotator, a.order, a.label)} <= set(given)
        with torch.profiler.profile() as recorded:
            found = empty()
        assert found.shape == output.shape and found.requires_grad == bool(ours.leaves)
        assert all(leaf.grad.shape == leaf.shape for leaf in ours.leaves)
        done = {event.name for event in recorded.events() if event.name.startswith("aten::")}
        made = {"aten::empty_like", "aten::empty", "aten::empty_strided", "aten::detach", "aten::ones_like"}
        assert done <= made | {"aten::fill_", "aten::new_empty_strided", "aten::ones"}, op.name


def test_peak_memory_sees_a_planted_allocation(kernels: ModuleType) -> None:
    leaf = torch.ones(2**18, requires_grad=True)

    def function(planted: int) -> Tensor:
        torch.empty(planted, dtype=torch.uint8)
        return leaf.sum()

    def measured(planted: int) -> int:
        return kernels.peak_extra_bytes(kernels.Candidate(function, [planted], [leaf]))

    assert measured(0) < 10_000  # the gradient's megabyte does not count
    assert measured(0) + 2**22 - 10_000 < measured(2**22) < measured(0) + 2**22 + 10_000


def test_peak_memory_is_what_is_alive_at_once(kernels: ModuleType) -> None:
    def function() -> Tensor:
        for _ in range(3):
            torch.empty(2**20, dtype=torch.uint8)
        return torch.zeros(())

    assert 2**20 <= kernels.peak_extra_bytes(kernels.Candidate(function, [], [])) < 2**20 + 10_000


def test_a_wrong_formulation_is_not_timed(kernels: ModuleType) -> None:
    op = kernels.OPS[0]

    def wrong(problem: Any) -> Any:
        right = op.ours(problem)
        return dataclasses.replace(right, function=lambda *inputs: right.function(*inputs) * 1.01)

    altered = dataclasses.replace(op, others=[kernels.Formulation("wrong", wrong, (0, 0, 0))])
    ours, row = kernels.measure(altered, kernels.TINY, arguments(), PEAK)
    assert ours["formulation"] == "crowdnal" and ours["ratio_to_ours"] == 1
    assert row["milliseconds"] is None and row["skipped"].startswith("differs by")


def test_other_processes_are_noticed(kernels: ModuleType) -> None:
    if not Path("/proc/stat").is_file():
        assert kernels.OtherProcesses().cores() == 0
        return
    others = kernels.OtherProcesses()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(2)
        assert others.cores() > 0.3
    finally:
        busy.kill()
        busy.wait()


def test_nan_is_a_difference(kernels: ModuleType) -> None:
    assert math.isnan(kernels.difference([torch.tensor([1.0, math.nan])], [torch.ones(2)]))
    assert kernels.difference([torch.tensor([1.0, 3.0])], [torch.tensor([1.0, 2.0])]) == 0.5


def test_what_would_not_fit_is_skipped_with_its_reason(kernels: ModuleType) -> None:
    rows = kernels.measure(kernels.OPS[0], kernels.TINY, arguments(memory_gb=1e-9), PEAK)
    assert all("would allocate" in row["skipped"] for row in rows[1:])
    rows = kernels.measure(kernels.OPS[0], kernels.TINY, arguments(step_seconds=0.0), PEAK)
    assert {"a step takes 0.0 s"} == {row["skipped"] for row in rows[1:] if "imported" not in row["skipped"]}
