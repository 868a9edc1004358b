"""Label Studio: JSON, JSON-MIN and CSV (https://labelstud.io/guide/export)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crowdnal._utils.warn import warn
from crowdnal.data._columns import Column
from crowdnal.data._table import Table
from crowdnal.data.formats import Head, register
from crowdnal.data.formats._shared import Rows, listed, named, plain_cell, read_json, read_rows

_TOOL = "Label Studio"
_OWN = ("id", "inner_id", "annotation_id", "annotator", "created_at", "updated_at", "lead_time", "agreement")


def _is_json(head: Head) -> bool:
    record = head.record
    return isinstance(record, Mapping) and "data" in record and ("annotations" in record or "completions" in record)


@register("label-studio", detect=_is_json)
def read_full(path: Path) -> Table:
    """JSON: a record per task with its annotations. Skipped ones have no label; predictions are not annotations.

    Columns: ``id``, ``worker``, ``time``, one per field of the task's data and one per choice, rating or taxonomy.
    """
    value, place = read_json(path, _TOOL)
    rows, data, answers, skipped = Rows(path), dict[str, None](), dict[str, None](), 0
    for n, task in enumerate(listed(value, path, _TOOL)):
        if not isinstance(task.get("data"), Mapping):
            raise ValueError(f"{place(n)} has no data: Label Studio's JSON is meant, not JSON-MIN (label-studio-min)")
        fields = {name: field for name, field in task["data"].items() if not isinstance(field, (Mapping, list))}
        data |= dict.fromkeys(fields)
        for annotation in task.get("annotations", task.get("completions")) or ():
            cancelled = annotation.get("was_cancelled") or annotation.get("skipped")
            skipped += bool(cancelled)
            given = {} if cancelled else _answers(annotation.get("result") or ())
            answers |= dict.fromkeys(given)
            who = annotation.get("completed_by")
            if isinstance(who, Mapping):
                who = who.get("email") or who.get("id")
            time = annotation.get("updated_at") or annotation.get("created_at")
            rows.add(place(n), {"id": task.get("id"), **fields, "worker": who, "time": time, **given})
    if skipped:
        warn(f"{path}: {skipped} of {len(rows.cells)} annotations were skipped and have no label")
    return rows.table(task=list(data), label=list(answers))


def _answers(result: Any) -> dict[str, Any]:
    """What was said of the whole task; regions are no labels of it."""
    given: dict[str, Any] = {}
    for region in result:
        value = region.get("value", {})
        for kind in ("choices", "rating", "taxonomy", "number"):
            if kind in value and "start" not in value and "x" not in value:
                said = value[kind]
                if kind == "taxonomy":
                    said = [" / ".join(map(str, way)) for way in said]
                given[region.get("from_name", kind)] = said
    return given


@register("label-studio-min", detect=lambda head: _has_own(head.record or ()))
def read_min(path: Path) -> Table:
    """JSON-MIN: a record per annotation, the task's data before its id and the answers behind it."""
    value, place = read_json(path, _TOOL)
    rows, data, answers = Rows(path), dict[str, None](), dict[str, None]()
    for n, record in enumerate(listed(value, path, _TOOL)):
        names = list(record)
        middle = names.index("id") if "id" in names else 0
        data |= dict.fromkeys(name for name in names[:middle] if name not in _OWN)
        answers |= dict.fromkeys(name for name in names[middle:] if name not in _OWN)
        rows.add(place(n), {name: _cell(cell) for name, cell in record.items()})
    time = "updated_at" if "updated_at" in rows.cells[0] else "created_at"
    return rows.table(task=list(data), worker=["annotator"], label=list(answers), time=[time])


@register("label-studio-csv", detect=lambda head: _has_own(head.header))
def read_csv(path: Path) -> Table:
    """CSV or TSV: a row per annotation; which columns are the task's and the answer's is to be named if not clear."""
    table = read_rows(path, ["annotator", "annotation_id"], _TOOL)
    columns = {
        name: column.mapped(lambda cell: _cell(json.loads(cell)) if _is_several(cell) else cell)
        if isinstance(column, Column) and any(_is_several(cell) for cell in column.values)
        else column
        for name, column in table.columns.items()
    }
    names = list(columns)
    middle = names.index("id") if "id" in names else names.index("annotator")
    data = [name for name in names[:middle] if name not in _OWN]
    answers = [name for name in names[middle:] if name not in _OWN]
    time = "updated_at" if "updated_at" in names else "created_at"
    found = Table(columns, table.source, table.place)
    return named(found, task=data, worker=["annotator"], label=answers, time=[time])


def _has_own(names: Any) -> bool:
    return {"annotator", "annotation_id", "lead_time"} <= set(names)


def _is_several(cell: Any) -> bool:
    return isinstance(cell, str) and cell.startswith('{"choices"')


def _cell(value: Any) -> Any:
    if isinstance(value, Mapping) and "choices" in value:
        return plain_cell(value["choices"])
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        value = [part.get("rating", part.get("number", part.get("taxonomy", json.dumps(part)))) for part in value]
    return json.dumps(value) if isinstance(value, Mapping) else value
