"""The benchmark of what the prior costs: a quick run writes consistent rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "prior.py"


def test_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--threads", "1", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [row["objective"] for row in rows] == ["crowd-layer", "trace", "geocrowdnet", "single-confusion"]
    for row in rows:
        assert row["cell"] == "labelme" and row["objective"] in done.stdout
        assert row["without"] > 0 and row["with"] > 0 and 0 < row["ratio"] < 10
