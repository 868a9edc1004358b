"""A quick run of a script of benchmarks/ in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def quick_run(script: str, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """The rows that it writes, and what it prints."""
    file = folder / "rows.json"
    command = [sys.executable, str(BENCHMARKS / script), "--quick", "--threads", "1", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())["rows"], done.stdout
