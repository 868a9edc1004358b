"""The benchmark of losses in one pass: a quick run writes consistent rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "one_pass.py"


def test_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--threads", "1", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    losses = [
        "softmax",
        *(f"{link}-{kind}" for link in ("mixture", "joint") for kind in ("softmax", "softplus", "none")),
    ]
    assert [row["loss"] for row in rows] == losses
    for row in rows:
        assert row["cell"] == "labelme" and row["loss"] in done.stdout
        for kind in ("native", "step"):
            assert 0 < row[f"{kind}_ratio"] < 10 and row[f"{kind}_one"] > 0 and row[f"{kind}_two"] > 0
