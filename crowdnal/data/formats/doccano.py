"""Doccano: JSON lines, one file per annotator or with the annotations of all (https://doccano.github.io/doccano)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crowdnal.data._table import Table
from crowdnal.data.formats import Head, register
from crowdnal.data.formats._shared import Rows, is_several, listed, one_per_annotator, parsed, read_json

_DATA = ("filename", "text", "data")


def _is_doccano(head: Head) -> bool:
    record = head.record
    if not isinstance(record, Mapping) or "id" not in record or not set(_DATA) & set(record):
        return False
    annotations = record.get("annotations")
    with_user = isinstance(annotations, list) and all(isinstance(a, Mapping) and "user" in a for a in annotations)
    return isinstance(record.get("label"), list) or (with_user and bool(annotations))


@register("doccano", detect=_is_doccano)
def read(path: Path) -> Table:
    """A folder or archive with a file per annotator (``ann.jsonl``), or a file whose annotations name the user.

    Columns: ``task`` (the image's file name where there is one, else the id), ``worker``, ``label``, ``id``, ``text``.
    """
    rows = Rows(path)
    if is_several(path):
        for annotator, content, name in one_per_annotator(path, ".jsonl", "doccano"):
            if annotator != "all":  # beside one per annotator doccano writes what all of them said
                value, place = parsed(content, name, "doccano")
                for n, record in enumerate(listed(value, path, "doccano")):
                    label = record.get("label", record.get("labels"))
                    rows.add(place(n), {**_task(record), "worker": annotator, "label": label})
        return rows.table()
    value, place = read_json(path, "doccano")
    for n, record in enumerate(listed(value, path, "doccano")):
        annotations = record.get("annotations")
        if not isinstance(annotations, list):
            raise ValueError(
                f"{place(n)} does not say who annotated: give the folder or archive with a file per annotator (without "
                "shared annotations), or JSON with annotations and their user"
            )
        said: dict[Any, list[Any]] = {}
        for annotation in annotations:
            said.setdefault(annotation.get("user"), []).append(annotation.get("label"))
        for user, labels in said.items():
            rows.add(place(n), {**_task(record), "worker": user, "label": labels})
    return rows.table()


def _task(record: Mapping[str, Any]) -> dict[str, Any]:
    file = record.get("filename")
    return {"task": record.get("id") if file is None else file, "id": record.get("id"), "text": record.get("text")}
