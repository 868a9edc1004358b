"""COCO's JSON, where categories stand for whole images (https://cocodataset.org/#format-data)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from crowdnal.data._table import Table
from crowdnal.data.formats import register
from crowdnal.data.formats._shared import Rows, is_several, one_per_annotator, parsed, read_json

_KEYS = {"images", "annotations", "categories"}


@register("coco", detect=lambda head: isinstance(head.record, Mapping) and set(head.record) >= _KEYS)
def read(path: Path) -> Table:
    """A folder or archive with a file per annotator (``ann.json``), or a file whose annotations say who made them.

    Columns: ``task`` (the image's file name), ``label`` (the category's name), ``worker`` for a file per annotator, and
    all single fields of an annotation, also of its ``attributes``: ``worker="annotator"`` names the one that says who.
    """
    rows = Rows(path)
    for annotator, value, name in _files(path):
        if not isinstance(value, Mapping) or not set(value) >= _KEYS:
            raise ValueError(f"{name} is no COCO: it must have {', '.join(sorted(_KEYS))}")
        images = {image["id"]: image.get("file_name", image["id"]) for image in value["images"]}
        categories = {category["id"]: category.get("name", category["id"]) for category in value["categories"]}
        for n, annotation in enumerate(value["annotations"]):
            place = f"{name}, annotation {n + 1}"
            for key, known in (("image_id", images), ("category_id", categories)):
                if annotation.get(key) not in known:
                    raise ValueError(f"{place}: {key} {annotation.get(key)!r} is not in the file")
            more = {**annotation, **(annotation.get("attributes") or {})}
            single = {key: cell for key, cell in more.items() if not isinstance(cell, (list, Mapping))}
            cells = {"task": images[annotation["image_id"]], "label": categories[annotation["category_id"]]}
            rows.add(place, {**single, **cells, **({"worker": annotator} if annotator else {})})
    return rows.table()


def _files(path: Path) -> Iterator[tuple[str, Any, str]]:
    if is_several(path):
        for annotator, content, name in one_per_annotator(path, ".json", "COCO"):
            yield annotator, parsed(content, name, "COCO")[0], name
    else:
        yield "", read_json(path, "COCO")[0], str(path)
