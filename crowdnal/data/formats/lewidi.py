"""Learning with Disagreements (Le-Wi-Di): one JSON object, an item per key (https://le-wi-di.github.io)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crowdnal.data._table import Table
from crowdnal.data.formats import Head, register
from crowdnal.data.formats._shared import Rows, read_json


def _is_lewidi(head: Head) -> bool:
    first = next(iter(head.record.values()), None) if isinstance(head.record, Mapping) and head.record else None
    return isinstance(first, Mapping) and {"annotators", "annotations"} <= set(first)


@register("lewidi", detect=_is_lewidi)
def read(path: Path) -> Table:
    """Annotators and annotations side by side, by commas (2023), or annotations by annotator (2025).

    ``task`` is the key of the item. Where an annotator gave several labels to an item, all of them are a set.
    """
    value, _ = read_json(path, "Le-Wi-Di")
    if not isinstance(value, Mapping):
        raise ValueError(f"{path} is no JSON of Le-Wi-Di: it must have an item per key")
    rows = Rows(path)
    for key, item in value.items():
        place = f"{path}, item {key!r}"
        if not isinstance(item, Mapping) or "annotations" not in item:
            raise ValueError(f"{place} has no annotations: Le-Wi-Di's JSON has them for every item")
        for worker, label in _pairs(item, place):
            rows.add(place, {"task": key, "worker": worker, "label": label})
    return rows.table()


def _pairs(item: Mapping[str, Any], place: str) -> list[tuple[Any, Any]]:
    annotations = item["annotations"]
    if isinstance(annotations, Mapping):
        several = {worker: _split(said) if isinstance(said, str) else said for worker, said in annotations.items()}
        return list(several.items())
    workers, labels = _split(item.get("annotators", "")), _split(annotations)
    if len(workers) != len(labels):
        raise ValueError(f"{place} has {len(labels)} annotations for {len(workers)} annotators: give one each")
    return list(zip(workers, labels, strict=True))


def _split(text: Any) -> list[Any]:
    if isinstance(text, list):
        return text
    return [word.strip() for word in str(text).split(",")] if str(text).strip() else []
