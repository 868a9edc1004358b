"""The benchmark of the cross-entropy in one pass: a quick run writes consistent rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "one_pass.py"


def test_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--threads", "1", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["rows"]
    assert row["cell"] == "labelme" and "labelme" in done.stdout
    for kind in ("native", "step"):
        assert row[f"{kind}_ratio"] == pytest.approx(row[f"{kind}_one"] / row[f"{kind}_two"])
