"""CVAT for images: the tags of images in XML (https://docs.cvat.ai/docs/other/xml_format)."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from crowdnal.data._table import Table
from crowdnal.data._text import read_head
from crowdnal.data.formats import register
from crowdnal.data.formats._shared import Rows, contents, is_several, one_per_annotator

_ONE = "annotations.xml"  # the only file of annotations in what CVAT exports


@register("cvat", detect=lambda head: "<annotations>" in head.text and "<image " in head.text)
def read(path: Path) -> Table:
    """Tags, which stand for a whole image; boxes and shapes are no labels of it.

    CVAT does not write who set a tag: a folder or archive has a file per annotator (``ann.xml``, or ``ann.zip`` as CVAT
    exports it), else the assignee of the task or job is meant. Columns: ``task``, ``worker``, ``label``, and one per
    attribute of the tags.
    """
    rows = Rows(path)
    for annotator, content, name in _files(path):
        if "<!DOCTYPE" in content or "<!ENTITY" in content:
            raise ValueError(f"{name} declares entities, which no export of CVAT does")
        try:
            root = ElementTree.fromstring(content)
        except ElementTree.ParseError as error:
            raise ValueError(f"{name} is not XML ({error})") from None
        who = annotator or root.findtext(".//meta//assignee/username")
        if not who:
            raise ValueError(f"{name} does not say who annotated: give a folder with a file per annotator (ann.xml)")
        for image in root.iter("image"):
            tags = image.findall("tag")
            attributes = {
                str(attribute.get("name")): attribute.text for tag in tags for attribute in tag.iter("attribute")
            }
            cells = {"task": image.get("name"), "worker": who, "label": [tag.get("label") for tag in tags]}
            rows.add(f"{name}, image {image.get('name')!r}", attributes | cells)
    return rows.table()


def _files(path: Path) -> Iterator[tuple[str, str, str]]:
    if path.is_dir():
        for archive in sorted(path.rglob("*.zip")):
            yield archive.stem, *_only(archive)
        if any(path.rglob("*.xml")) or not any(path.rglob("*.zip")):
            yield from one_per_annotator(path, ".xml", "CVAT")
    elif is_several(path):
        files = contents(path, ".xml")
        if list(files) == [_ONE]:
            yield "", files[_ONE], f"{path}/{_ONE}"
        else:
            yield from one_per_annotator(path, ".xml", "CVAT")
    else:
        with read_head(path, None).open() as file:
            yield "", file.read(), str(path)


def _only(archive: Path) -> tuple[str, str]:
    files = contents(archive, _ONE)
    if _ONE not in files:
        raise ValueError(f"{archive} holds no {_ONE}: export it as CVAT for images")
    return files[_ONE], f"{archive}/{_ONE}"
