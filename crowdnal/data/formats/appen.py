"""Appen, once Figure Eight and CrowdFlower: the full report as CSV, a row per judgment."""

from __future__ import annotations

from pathlib import Path

from crowdnal.data._table import Table
from crowdnal.data.formats import register
from crowdnal.data.formats._shared import is_one_of, named, read_rows, without


@register("appen", detect=lambda head: {"_unit_id", "_worker_id"} <= set(head.header))
def read(path: Path) -> Table:
    """Judgments that Appen calls tainted are left out, which is said.

    Columns: those of the file, and ``time`` of the judgment. ``task`` is ``_unit_id`` (``--task-column`` names the
    column of the image), ``label`` the only question, which is known by its ``_gold`` column; else name yours.
    ``weight="_trust"`` weights by Appen's trust in the contributor.
    """
    table = read_rows(path, ["_unit_id", "_worker_id"], "Appen")
    if "_tainted" in table.columns:
        table = without(table, is_one_of(table.columns["_tainted"], ["true"]), "because Appen calls them tainted")
    names = list(table.columns)
    questions = [name for name in names if f"{name}_gold" in names]
    return named(table, task=["_unit_id"], worker=["_worker_id"], label=questions, time=["_created_at"])
