"""Peerannot: ``answers.json``, a label per task and worker (https://peerannot.github.io)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from crowdnal.data._table import Table
from crowdnal.data.formats import register
from crowdnal.data.formats._shared import Rows, read_json


@register("peerannot")
def read(path: Path) -> Table:
    """``{task: {worker: label}}``; task and worker are numbers in the order of peerannot's own lists."""
    value, _ = read_json(path, "peerannot")
    if not isinstance(value, Mapping) or not all(isinstance(answers, Mapping) for answers in value.values()):
        raise ValueError(f"{path} is no answers.json of peerannot: it must be {{task: {{worker: label}}}}")
    rows = Rows(path)
    for task, answers in value.items():
        for worker, label in answers.items():
            rows.add(f"{path}, task {task!r}", {"task": task, "worker": worker, "label": label})
    return rows.table()
