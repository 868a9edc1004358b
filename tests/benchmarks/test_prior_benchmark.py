"""The benchmark of what the prior costs: a quick run writes consistent rows."""

from __future__ import annotations

from pathlib import Path

from support.quick_runs import quick_run


def test_quick_run(tmp_path: Path) -> None:
    rows, printed = quick_run("prior.py", tmp_path)
    assert [row["objective"] for row in rows] == ["crowd-layer", "trace", "geocrowdnet", "single-confusion"]
    for row in rows:
        assert row["cell"] == "labelme" and row["objective"] in printed
        assert row["without"] > 0 and row["with"] > 0 and 0 < row["ratio"] < 10
