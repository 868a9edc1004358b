"""Toloka: assignments as TSV, columns INPUT:, OUTPUT:, ASSIGNMENT: (https://toloka.ai/docs)."""

from __future__ import annotations

from pathlib import Path

from crowdnal.data._table import Table
from crowdnal.data.formats import register
from crowdnal.data.formats._shared import is_one_of, named, read_rows, without


@register("toloka", detect=lambda head: "ASSIGNMENT:worker_id" in head.header)
def read(path: Path) -> Table:
    """A row per answer; those of assignments that were rejected, skipped or expired are left out, which is said.

    Columns: those of the file, and ``time`` of submission. ``task`` is the only ``INPUT:`` column, ``label`` the only
    ``OUTPUT:`` column; where there are several, name yours. Control tasks (``GOLDEN:``) are tasks.
    """
    table = read_rows(path, ["ASSIGNMENT:worker_id"], "Toloka")
    if "ASSIGNMENT:status" in table.columns:
        gone = is_one_of(table.columns["ASSIGNMENT:status"], ["rejected", "skipped", "expired"])
        table = without(table, gone, "because their assignments were rejected, skipped or expired")
    inputs = [name for name in table.columns if name.startswith("INPUT:")]
    outputs = [name for name in table.columns if name.startswith("OUTPUT:")]
    return named(
        table,
        task=inputs or ["ASSIGNMENT:task_id"],
        worker=["ASSIGNMENT:worker_id"],
        label=outputs,
        time=["ASSIGNMENT:submitted"],
    )
