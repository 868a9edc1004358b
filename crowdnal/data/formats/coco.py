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
        images = _by_id(value, "images", "file_name", name)
        categories = _by_id(value, "categories", "name", name)
        for n, annotation in enumerate(_records(value, "annotations", name)):
            place = f"{name}, annotation {n + 1}"
            for key, known in (("image_id", images), ("category_id", categories)):
                if not _is_id(annotation.get(key)) or annotation[key] not in known:
                    raise ValueError(f"{place}: {key} {annotation.get(key)!r} is not in the file")
            attributes = annotation.get("attributes")
            more = {**annotation, **(attributes if isinstance(attributes, Mapping) else {})}
            single = {key: cell for key, cell in more.items() if not isinstance(cell, (list, Mapping))}
            cells = {"task": images[annotation["image_id"]], "label": categories[annotation["category_id"]]}
            rows.add(place, {**single, **cells, **({"worker": annotator} if annotator else {})})
    return rows.table()


def _records(value: Mapping[str, Any], what: str, name: str) -> list[Mapping[str, Any]]:
    """The images, categories or annotations."""
    found = value[what]
    if not isinstance(found, list) or not all(isinstance(record, Mapping) for record in found):
        raise ValueError(f"{name} is no COCO: {what} must be a list of records")
    return found


def _by_id(value: Mapping[str, Any], what: str, called: str, name: str) -> dict[Any, Any]:
    """Names of images or categories by id."""
    found = {}
    for n, record in enumerate(_records(value, what, name), 1):
        if not _is_id(record.get("id")):
            raise ValueError(f"{name}, record {n} of {what} has no id: COCO numbers them")
        found[record["id"]] = record.get(called, record["id"])
    return found


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, str))


def _files(path: Path) -> Iterator[tuple[str, Any, str]]:
    if is_several(path):
        for annotator, content, name in one_per_annotator(path, ".json", "COCO"):
            yield annotator, parsed(content, name, "COCO")[0], name
    else:
        yield "", read_json(path, "COCO")[0], str(path)
