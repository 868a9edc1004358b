"""Get-Another-Label: worker, item and label by tabs, no header (https://github.com/ipeirotis/Get-Another-Label)."""

from __future__ import annotations

from pathlib import Path

from crowdnal.data._csv import read_delimited
from crowdnal.data._table import Table
from crowdnal.data._text import read_dialect, read_head
from crowdnal.data.formats import register

_NAMES = ("worker", "task", "label")


@register("get-another-label")
def read(path: Path) -> Table:
    """The file of labels that workers gave (``--input``)."""
    text = read_head(path, None)
    dialect = read_dialect(text, [], "\t", blanks=False)
    if len(dialect.header) != len(_NAMES):
        raise ValueError(f"{path} has {len(dialect.header)} columns by tabs: it must have worker, item and label")
    return read_delimited(text, dialect, _NAMES, _NAMES, headed=False)
