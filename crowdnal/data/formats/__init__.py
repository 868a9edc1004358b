"""Exports of other tools, by name: a file each, registered here and found by content.

A format is a function from a path to a :class:`Table` or, where the tool writes one, a :class:`Matrix`::

    @register("label-studio", detect=lambda head: isinstance(head.record, dict) and "annotations" in head.record)
    def read(path: Path) -> Table:
        '''Label Studio's JSON export.'''

The table has the columns of the export under their own names, so that ``task=``, ``worker=`` and ``label=`` can name
them, and beside them ``task``, ``worker`` and ``label`` wherever there is no choice; ``weight`` and ``time`` (then
``last=True`` goes by it) where the tool writes them. Modules of this package whose names do not start with an
underscore are imported when a format is first needed.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from crowdnal.data._columns import Column
from crowdnal.data._dense import Matrix
from crowdnal.data._table import Table

__all__ = ["Column", "Format", "Head", "Matrix", "Reader", "Table", "formats", "propose", "register"]


class Head(NamedTuple):
    """What a format sees of a file in order to tell whether it is its own.

    ``header`` is the first row of a delimited file, ``record`` the first record of JSON or of JSON lines (the whole
    value where it is no list), ``text`` the first 64 KiB.
    """

    path: Path
    text: str
    header: tuple[str, ...] = ()
    record: Any = None


Reader = Callable[[Path], Table | Matrix]


class Format(NamedTuple):
    """A registered format."""

    name: str
    read: Reader
    detect: Callable[[Head], bool]


_formats: dict[str, Format] = {}


def register(name: str, *, detect: Callable[[Head], bool] = lambda head: False) -> Callable[[Reader], Reader]:
    """Decorator of a function that reads a file of a format.

    Args:
        name: what ``format=`` and ``--format`` take.
        detect: whether a file looks like one; it is proposed then, never taken unasked.
    """

    def keep(read: Reader) -> Reader:
        _formats[name] = Format(name, read, detect)
        return read

    return keep


def formats() -> Mapping[str, Format]:
    """All formats by name."""
    for info in pkgutil.iter_modules(__path__):
        if not info.name.startswith("_"):
            importlib.import_module(f"{__name__}.{info.name}")
    return dict(sorted(_formats.items()))


def propose(head: Head) -> str:
    """A sentence about the formats that a file looks like, or nothing."""
    names = [known.name for known in formats().values() if known.detect(head)]
    return f"; it looks like an export of {' or '.join(names)}: give format={names[0]!r}" if names else ""
