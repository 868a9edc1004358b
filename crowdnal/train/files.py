"""Files that are either whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as stream:  # on disk before the name points to it
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Temporary files of a process that was killed while it wrote in ``folder``."""
    for temporary in folder.rglob(".*.tmp"):
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file at once."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write JSON at once."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def save_state(path: Path, state: Any) -> None:
    """``torch.save`` at once."""
    with atomic(path) as temporary:
        torch.save(state, temporary)


def load_state(path: Path) -> Any:
    """What :func:`save_state` wrote; tensors and plain values only."""
    return torch.load(path, map_location="cpu", weights_only=True)
