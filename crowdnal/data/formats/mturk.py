"""Amazon Mechanical Turk: batch results as CSV (https://docs.aws.amazon.com/AWSMechTurk)."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from crowdnal.data._columns import Column
from crowdnal.data._table import Table
from crowdnal.data.formats import register
from crowdnal.data.formats._shared import is_one_of, named, plain_cell, read_rows, without

_OFFSETS = {"PST": -8, "PDT": -7, "UTC": 0, "GMT": 0}
_CROWD_FORM = "Answer.taskAnswers"


@register("mturk", detect=lambda head: {"HITId", "WorkerId", "AssignmentStatus"} <= set(head.header))
def read(path: Path) -> Table:
    """A row per assignment; rejected ones are left out, which is said.

    Columns: those of the file, the answers of a crowd form as ``Answer.NAME``, and ``time``. ``task`` is the only
    ``Input.`` column, ``label`` the only ``Answer.`` column; where there are several, name yours.
    """
    table = read_rows(path, ["HITId", "WorkerId", "AssignmentStatus"], "Mechanical Turk")
    columns = dict(table.columns)
    if _CROWD_FORM in columns:
        columns |= _form(columns.pop(_CROWD_FORM))
    if "SubmitTime" in columns:
        columns["time"] = columns["SubmitTime"].mapped(_iso)
    table = Table(columns, table.source, table.place)
    rejected = is_one_of(columns["AssignmentStatus"], ["rejected"])
    if "Reject" in columns:  # what the requester fills in before the file goes back
        rejected |= columns["Reject"].codes >= 0
    table = without(table, rejected, "because their assignments were rejected")
    inputs = [name for name in columns if str(name).startswith("Input.")]
    answers = [name for name in columns if str(name).startswith("Answer.")]
    return named(table, task=inputs or ["HITId"], worker=["WorkerId"], label=answers)


def _form(column: Column) -> dict[str, Column]:
    """The fields of a crowd form's JSON, a column each."""
    forms = [_fields(value) for value in column.values]
    names = dict.fromkeys(name for form in forms for name in form)
    return {
        f"Answer.{name}": Column(column.codes, [form.get(name) for form in forms])
        .mapped(lambda value: value)
        .by_appearance()
        for name in names
    }


def _fields(value: Any) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except (TypeError, json.JSONDecodeError):
        return {}
    record = found[0] if isinstance(found, list) and found else found
    return {name: _choice(cell) for name, cell in record.items()} if isinstance(record, dict) else {}


def _choice(cell: Any) -> Any:
    if isinstance(cell, dict):
        cell = [cell["label"]] if "label" in cell else cell.get("labels", [n for n, on in cell.items() if on is True])
    return plain_cell(cell)


def _iso(text: Any) -> Any:
    """``Mon Mar 02 10:11:00 PST 2020`` as ISO 8601 in UTC."""
    words = str(text).split()
    try:
        when = datetime.strptime(" ".join([*words[:4], words[5]]), "%a %b %d %H:%M:%S %Y")
        return (when - timedelta(hours=_OFFSETS[words[4]])).isoformat() + "Z"
    except (ValueError, KeyError, IndexError):
        return text
