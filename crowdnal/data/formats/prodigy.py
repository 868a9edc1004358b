"""Prodigy: ``prodigy db-out``, JSON lines (https://prodi.gy/docs/api-database)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crowdnal._utils.warn import warn
from crowdnal.data._table import Table
from crowdnal.data.formats import register
from crowdnal.data.formats._shared import Rows, listed, read_json


@register("prodigy", detect=lambda head: isinstance(head.record, Mapping) and "_input_hash" in head.record)
def read(path: Path) -> Table:
    """One answer a line: the option chosen, or accept and reject where there is one label to say yes or no to.

    Columns: ``task`` (the path of an image, its ``id``, else the hash of the input), ``worker`` (who annotated, else
    the session), ``label``, ``time``, ``text``. What was ignored has no label.
    """
    value, place = read_json(path, "Prodigy")
    rows, ignored, asked = Rows(path), 0, set[Any]()
    for n, record in enumerate(listed(value, path, "Prodigy")):
        answer = record.get("answer")
        ignored += answer == "ignore"
        if "accept" in record or "options" in record:
            label = record.get("accept") if answer == "accept" else None
        else:
            asked.add(record.get("label"))
            label = answer if answer in ("accept", "reject") else None
        if len(asked) > 1:
            raise ValueError(
                f"{place(n)} accepts or rejects {record.get('label')!r}, others another label: give a file per label"
            )
        who = record.get("_annotator_id") or record.get("_session_id")
        image = record.get("path") or record.get("image")
        if isinstance(image, str) and image.startswith("data:"):
            image = None
        meta = record.get("meta")
        name = image or record.get("id") or (meta.get("id") if isinstance(meta, Mapping) else None)
        cells = {"task": record.get("_input_hash") if name is None else name, "worker": who, "label": label}
        rows.add(place(n), {**cells, "time": record.get("_timestamp"), "text": record.get("text")})
    if ignored:
        warn(f"{path}: {ignored} of {len(rows.cells)} examples were ignored and have no label")
    return rows.table()
