"""Exports of other tools, by name: a file each, registered here and found by content.

A format is a function from a path to a :class:`Table` with columns ``task``, ``worker``, ``label`` and, where the tool
writes them, ``weight`` and ``time`` (then the last answer counts if it is asked for)::

    @register("label-studio", detect=lambda head: isinstance(head.record, dict) and "annotations" in head.record)
    def read(path: Path) -> Table:
        '''Label Studio's JSON export.'''

Modules of this package whose names do not start with an underscore are imported when a format is first needed.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from crowdnal.data._columns import Column
from crowdnal.data._table import Table

__all__ = ["Column", "Format", "Head", "Table", "formats", "propose", "register"]


class Head(NamedTuple):
    """What a format sees of a file in order to tell whether it is its own.

    ``header`` is the first row of a delimited file, ``record`` the first record of JSON or of JSON lines (the whole
    value where it is no list), ``text`` the first 64 KiB.
    """

    path: Path
    text: str
    header: tuple[str, ...] = ()
    record: Any = None


class Format(NamedTuple):
    """A registered format."""

    name: str
    read: Callable[[Path], Table]
    detect: Callable[[Head], bool]


_formats: dict[str, Format] = {}


def register(
    name: str, *, detect: Callable[[Head], bool] = lambda head: False
) -> Callable[[Callable[[Path], Table]], Callable[[Path], Table]]:
    """Decorator of a function that reads a file of a format.

    Args:
        name: what ``format=`` and ``--format`` take.
        detect: whether a file looks like one; it is proposed then, never taken unasked.
    """

    def keep(read: Callable[[Path], Table]) -> Callable[[Path], Table]:
        _formats[name] = Format(name, read, detect)
        return read

    return keep


@cache
def formats() -> Mapping[str, Format]:
    """All formats by name."""
    for info in pkgutil.iter_modules(__path__):
        if not info.name.startswith("_"):
            importlib.import_module(f"{__name__}.{info.name}")
    return _formats


def propose(head: Head) -> str:
    """A sentence about the formats that a file looks like, or nothing."""
    names = [known.name for known in formats().values() if known.detect(head)]
    return f"; it looks like an export of {' or '.join(names)}: give format={names[0]!r}" if names else ""
