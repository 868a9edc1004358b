"""The benchmark of losses in one pass: a quick run writes consistent rows."""

from __future__ import annotations

from pathlib import Path

from support.quick_runs import quick_run


def test_quick_run(tmp_path: Path) -> None:
    rows, printed = quick_run("one_pass.py", tmp_path)
    losses = [
        "softmax",
        *(f"{link}-{kind}" for link in ("mixture", "joint") for kind in ("softmax", "softplus", "none")),
    ]
    assert [row["loss"] for row in rows] == losses
    for row in rows:
        assert row["cell"] == "labelme" and row["loss"] in printed
        for kind in ("native", "step"):
            assert 0 < row[f"{kind}_ratio"] < 10 and row[f"{kind}_one"] > 0 and row[f"{kind}_two"] > 0
