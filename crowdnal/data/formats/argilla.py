"""Argilla: records as JSON, and as rows of Hugging Face's ``datasets`` (https://docs.argilla.io)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from crowdnal._utils.warn import warn
from crowdnal.data._table import Table
from crowdnal.data.formats import Head, register
from crowdnal.data.formats._shared import Rows
from crowdnal.data.formats.datasets import read_records

_Answer = tuple[str, Any, Any, str]  # question, user, value, status


def _is_argilla(head: Head) -> bool:
    record = head.record
    if not isinstance(record, Mapping):
        return False
    return isinstance(record.get("responses"), (Mapping, list)) or any(_is_question(record, name) for name in record)


def _is_question(record: Mapping[str, Any], name: str) -> bool:
    value = record[name]
    old = isinstance(value, list) and value and all(isinstance(v, Mapping) and "user_id" in v for v in value)
    return bool(old) or f"{name}.users" in record


@register("argilla", detect=_is_argilla)
def read(path: Path) -> Table:
    """JSON, JSON lines or Parquet; a column per question. Discarded responses and drafts have no label.

    Columns: ``task`` (the record's id, ``external_id`` in Argilla 1), ``worker``, one per question, and the fields.
    """
    rows, questions, other = Rows(path), dict[str, None](), 0
    found, place = read_records(path, "Argilla")
    for n, record in enumerate(found):
        task = next((record[name] for name in ("external_id", "id", "_server_id") if record.get(name) is not None), n)
        fields = record.get("fields", record)
        cells = {name: cell for name, cell in fields.items() if isinstance(cell, str)}
        said: dict[Any, dict[str, Any]] = {}
        for question, user, value, status in _responses(record):
            questions[question] = None
            other += status not in ("submitted", "")
            said.setdefault(user, {})[question] = value if status in ("submitted", "") else None
        for user, answers in said.items():
            rows.add(place(n), {**cells, "task": task, "worker": user, **answers})
    if other:
        warn(f"{path}: {other} responses are discarded or drafts and have no label")
    return rows.table(label=list(questions))


def _responses(record: Mapping[str, Any]) -> Iterator[_Answer]:
    responses = record.get("responses")
    if isinstance(responses, Mapping):  # Argilla 2, to_json
        for question, answers in responses.items():
            for answer in answers or ():
                yield question, answer.get("user_id"), answer.get("value"), answer.get("status") or ""
    elif isinstance(responses, list):  # Argilla 1, the API's records
        for answer in responses:
            for question, value in (answer.get("values") or {}).items():
                yield question, answer.get("user_id"), value.get("value"), answer.get("status") or ""
    for name, answers in record.items():
        if name.endswith(".responses") and f"{name}.users" in record:  # Argilla 2, to_datasets
            users = record[f"{name}.users"] or ()
            states = record.get(f"{name}.status") or [""] * len(users)
            for user, value, status in zip(users, answers or (), states, strict=True):
                yield name.removesuffix(".responses"), user, value, status
        elif isinstance(answers, list) and answers and _is_question(record, name):  # Argilla 1, datasets
            for answer in answers:
                yield name, answer["user_id"], answer.get("value"), answer.get("status") or ""
