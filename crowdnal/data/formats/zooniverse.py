"""Zooniverse: the classification export, CSV with JSON inside (https://help.zooniverse.org/next-steps/data-exports)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crowdnal.data._columns import Column
from crowdnal.data._table import Table
from crowdnal.data.formats import register
from crowdnal.data.formats._shared import named, plain_cell, read_rows


@register("zooniverse", detect=lambda head: {"classification_id", "subject_ids", "annotations"} <= set(head.header))
def read(path: Path) -> Table:
    """A row per classification.

    Columns: those of the file; one per question (``T0``, ``T1`` ...; the species of a survey); one per field of the
    subject, such as ``subject.Filename``; ``time``. ``task`` is the subject's id, ``worker`` the user's name, or what
    stands for one who did not log in; ``label`` the only question, else name yours.
    """
    table = read_rows(path, ["classification_id", "user_name", "subject_ids", "annotations"], "Zooniverse")
    columns = dict(table.columns)
    asked = _expanded(columns["annotations"], _answers, "{}", table)
    columns |= asked
    if "subject_data" in columns:
        columns |= _expanded(columns["subject_data"], _fields, "subject.{}", table)
    found = Table(columns, table.source, table.place)
    return named(found, task=["subject_ids"], worker=["user_name"], label=list(asked), time=["created_at"])


def _expanded(column: Column, read: Callable[[Any], dict[str, Any]], name: str, table: Table) -> dict[str, Column]:
    """What JSON in each cell says, a column per key."""
    cells = []
    for u, value in enumerate(column.values):
        try:
            cells.append(read(json.loads(value)))
        except (json.JSONDecodeError, AttributeError, TypeError) as error:
            n = int((column.codes == u).argmax())
            raise ValueError(f"{table.place(n)}: JSON that no classification export has ({error})") from None
    keys = dict.fromkeys(key for cell in cells for key in cell)
    return {
        name.format(key): Column(column.codes, [cell.get(key) for cell in cells]).mapped(lambda v: v).by_appearance()
        for key in keys
    }


def _answers(annotations: Any) -> dict[str, Any]:
    found = {}
    for annotation in annotations:
        value = annotation.get("value")
        if isinstance(value, list) and any(isinstance(part, dict) for part in value):
            choices = [part.get("choice") for part in value if isinstance(part, dict)]
            if None in choices:  # marks on the picture are no label of it
                continue
            value = choices
        if not isinstance(value, dict):
            found[annotation["task"]] = plain_cell(value)
    return found


def _fields(subjects: Any) -> dict[str, Any]:
    return {
        key: plain_cell(value)
        for subject in subjects.values()
        for key, value in subject.items()
        if not isinstance(value, (dict, list)) and key != "retired"
    }
