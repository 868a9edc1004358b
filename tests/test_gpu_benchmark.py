"""The benchmark of the GPU, tried on the CPU: it checks, measures, and writes what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
KEYS = {
    *("op", "cell", "formulation", "milliseconds", "ratio_to_ours", "share_of_copy", "peak_extra_bytes", "skipped"),
}


def test_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--quick", "--ops", "softplus"]
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert written["machine"]["copy_gb_per_s"] > 0 and written["geometric_mean_ratio"]["crowd_mixture_nll softplus"] > 0
    assert [row["formulation"] for row in written["rows"]][0] == "crowdnal"
    for row in written["rows"]:
        assert set(row) == KEYS
        assert (row["milliseconds"] is None) == (row["skipped"] is not None)
    (model,) = written["training"]
    assert model["model"] == "resnet18"
    ratio = model["head_milliseconds"] / model["plain_milliseconds"]
    assert abs(model["overhead"] - (ratio - 1)) < 1e-9
    assert "crowd_mixture_nll softplus" in done.stdout and "tiny" in done.stdout


def test_unknown_cells_are_refused() -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--cells", "none"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "unknown cells none" in done.stderr
