"""The benchmark of reading writes what its docstring says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "reading.py"


@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(SCRIPT), "--quick", "--json", str(tmp_path / "a.json")], check=True)
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["rows"] == 20_000
    assert set(found["files"]) == {f"{name}.{kind}" for name in ("by_task", "shuffled") for kind in ("csv", "parquet")}
    for one in found["files"].values():
        for name in ("seconds", "cpu_seconds"):
            assert one["crowdnal"][name] > 0 and one["pandas"][name] > 0
        assert one["seconds_ratio"] == pytest.approx(one["crowdnal"]["seconds"] / one["pandas"]["seconds"])
        assert one["crowdnal"]["peak_extra_bytes"] > 0
