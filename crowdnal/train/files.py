"""Files that are either whole or not there, errors that name them, and a folder for one run at a time."""

from __future__ import annotations

import hashlib
import json
import os
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from crowdnal.train.config import InputError

try:
    import fcntl
except ImportError:  # no such locks here
    fcntl = None  # type: ignore[assignment]

FEATURES = "features"
_TEMPORARY = ".crowdnal.tmp"
_HEAD = 1 << 16  # bytes of an image that tell it from another; most images are not longer


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY}")
    try:
        with writing(path):
            yield temporary
            with open(temporary, "rb") as stream:  # on disk before the name points to it
                os.fsync(stream.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """An error of the file system in the block, in whatever words, becomes one that names ``path``."""
    try:
        yield
    except Exception as error:  # torch and safetensors have errors of their own for a full disk
        if isinstance(error, (OSError, RuntimeError)) or type(error).__name__ == "SafetensorError":
            hint = "" if getattr(error, "errno", None) else ": is the disk full?"
            raise OSError(f"{path} could not be written ({str(error).splitlines()[0]}){hint}") from error
        raise


@contextmanager
def reading(path: Path, fix: str) -> Iterator[None]:
    """An error in the block, which reads and uses what a run wrote, becomes one that names ``path``.

    Raises:
        InputError: saying how to ``fix`` it.
    """
    try:
        yield
    except Exception as error:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 100)
        raise InputError(f"{path} is damaged ({reason}): {fix}") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep ``folder``, made where it is missing, for one process; a process that dies gives it back.

    Raises:
        InputError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with open(path, "a") as stream:
        try:
            if fcntl is not None:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = os.fstat(stream.fileno()).st_nlink == 0  # who had it has just removed the file
        except BlockingIOError:
            taken = True
        except OSError:  # a file system without locks
            taken = False
        if taken:
            raise InputError(f"--out {folder} is in use by another run: give another folder, or wait")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Temporary files of a run that was killed while it wrote in ``folder``; nobody else's."""
    for place in (folder, folder / FEATURES):
        for temporary in place.glob(f".*{_TEMPORARY}"):
            temporary.unlink(missing_ok=True)


def content_digest(files: Iterable[Path]) -> str:
    """Digest of the sizes and the first 64 KiB of files, in their order; quick even for very many."""
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            digest.update(f"{os.fstat(stream.fileno()).st_size} ".encode() + stream.read(_HEAD))
    return digest.hexdigest()


ERRORS = "backslashreplace"
"""What is written of names of files that are no UTF-8."""


def write_text(path: Path, text: str) -> None:
    """Write a text file at once."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors=ERRORS)


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
