"""Images as people have them: found in folders, matched to the tasks of a table, read as 8 bits per channel."""

from __future__ import annotations

import difflib
import os
import re
import unicodedata
import urllib.parse
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from crowdnal._utils.extras import require
from crowdnal.train.config import InputError

EXTENSIONS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_OTHER = frozenset({".dcm", ".dicom", ".nii", ".svs", ".ndpi", ".mrxs", ".heic", ".heif", ".avif", ".jp2", ".raw"})
_DEEP = {"I", "F", "I;16", "I;16B", "I;16L", "I;16N"}
_BITS = (8, 10, 12, 14, 16)


def read_image(path: Path, mode: str) -> Any:
    """An image in the mode L or RGB; of an animation or several pages the first.

    It is turned as its EXIF orientation says. What is transparent shows white. Where a channel has more than 8 bits,
    the smallest of 8, 10, 12, 14, 16 that hold the brightest pixel are scaled to 8; of floats 0 to 1, or, where they go
    beyond, and of negative numbers, darkest to brightest.

    Raises:
        InputError: it is no image, damaged, or larger than Pillow takes, naming it.
    """
    image_module, operations = require("PIL.Image", extra="train"), require("PIL.ImageOps", extra="train")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", image_module.DecompressionBombWarning)
            with image_module.open(path) as opened:
                opened.load()
                image = operations.exif_transpose(opened)
            return _shallow(image, image_module).convert(mode)
    except image_module.DecompressionBombError:
        raise InputError(
            f"{path} is too large to be read (more than {2 * image_module.MAX_IMAGE_PIXELS / 1e6:.0f} million pixels): "
            "make it smaller"
        ) from None
    except Exception as error:  # damaged files make decoders raise whatever there is
        raise InputError(f"{path} cannot be read as an image ({error}): mend, convert or remove it") from None


def _shallow(image: Any, image_module: Any) -> Any:
    """The image at 8 bits per channel, without transparency."""
    if image.mode in _DEEP:
        return image_module.fromarray(_scaled(np.asarray(image)))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = image_module.new("RGBA", image.size, (255, 255, 255, 255))
        return image_module.alpha_composite(white, image)
    return image


def _scaled(pixels: Any) -> Any:
    """Numbers of any range as bytes."""
    if not np.isfinite(pixels).all():
        raise ValueError("it has pixels that are NaN or infinite")
    low, high = (float(limit) for limit in (pixels.min(), pixels.max()))
    whole = pixels.dtype.kind in "iu"
    if low >= 0 and (high <= 1 if not whole else high < 1 << _BITS[-1]):
        low, high = 0.0, 1.0 if not whole else float((1 << next(bits for bits in _BITS if high < 1 << bits)) - 1)
    scale = 255 / (high - low) if high > low else 0.0
    return ((pixels.astype(np.float64) - low) * scale).round().astype(np.uint8)


# Finding


def find_images(root: Path, argument: str) -> list[str]:
    """Paths of the images under a folder and those it links to, relative to it, sorted, with forward slashes."""
    found, other = [], []
    for path in _files(root, frozenset({os.path.realpath(root)})):
        suffix = os.path.splitext(path)[1].lower()
        if suffix in EXTENSIONS:
            found.append(Path(path).relative_to(root).as_posix())
        elif suffix in _OTHER or path.lower().endswith(".nii.gz"):
            other.append(path)
    if not found:
        hint = f"; it has {other[0]}: convert such files to PNG" if other else ""
        raise InputError(f"{argument} {root} holds no images ({', '.join(sorted(EXTENSIONS))}){hint}")
    return sorted(found)


def _files(folder: Path | str, above: frozenset[str]) -> Iterator[str]:
    """Files that are not hidden, in depth; a link to a folder above itself is not followed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                real = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
                if real not in above:
                    yield from _files(entry.path, above | {os.path.realpath(entry.path)})
            elif entry.is_file():
                yield entry.path


# Matching


def match(tasks: Sequence[str], names: Sequence[str], root: Path, where: Callable[[int], str]) -> dict[str, int]:
    """Row in ``names`` of each distinct task.

    A task is a path relative to the folder, or its end, with or without extension; or a path of another place that ends
    so, be it a URL, absolute, or relative with folders before the whole path of a file. Of several spellings of one
    name (Unicode's composed and decomposed letters, percent signs in URLs, upper and lower case) the exact one is
    preferred.

    Raises:
        InputError: no such file (with near matches), several, or two tasks that are one file.
    """
    files = _Files(names)
    found: dict[str, int] = {}
    owner: dict[int, str] = {}
    for row, task in enumerate(tasks):
        if task in found:
            continue
        hits = files.find(task)
        if not hits:
            raise InputError(f"{where(row)}: no image {task!r} in {root}; {files.hint(task)}")
        if len(hits) > 1:
            several = ", ".join(names[i] for i in hits[:3])
            raise InputError(f"{where(row)}: {task!r} could be {several}: give the path relative to {root}")
        if hits[0] in owner:
            raise InputError(f"{where(row)}: tasks {owner[hits[0]]!r} and {task!r} are both {names[hits[0]]}")
        found[task] = hits[0]
        owner[hits[0]] = task
    return found


class _Files:
    """Names of files, looked up by their ends; an index is made when it is first needed."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.whole: dict[str, int] = {name: i for i, name in enumerate(names)}
        self.levels: dict[tuple[bool, bool], dict[str, list[int]]] = {}

    def find(self, task: str) -> list[int]:
        """The rows of the files that a task may mean."""
        for name, foreign in _spellings(task):
            if name in self.whole:
                return [self.whole[name]]
            parts = name.split("/")
            for any_case in (False, True):
                for bare in (False, True):
                    index = self._index(any_case, bare)
                    for start in range(len(parts)):
                        tail = _key("/".join(parts[start:]), any_case)
                        hits = index.get(tail, [])
                        if start and not foreign:  # folders before a file that lies in another folder: not this one
                            hits = [i for i in hits if self.names[i].count("/") == tail.count("/")]
                        exact = [i for i in hits if self.names[i].count("/") == tail.count("/")]
                        if hits:
                            return exact if len(exact) == 1 else hits
        return []

    def _index(self, any_case: bool, bare: bool) -> dict[str, list[int]]:
        """Rows by every end of their path, with or without extension."""
        level = any_case, bare
        if level not in self.levels:
            index: dict[str, list[int]] = {}
            for i, name in enumerate(self.names):
                parts = _key(os.path.splitext(name)[0] if bare else name, any_case).split("/")
                for start in range(len(parts)):
                    index.setdefault("/".join(parts[start:]), []).append(i)
            self.levels[level] = index
        return self.levels[level]

    def hint(self, task: str) -> str:
        """What may have been meant."""
        wanted = _spellings(task)[-1][0]
        last = _key(wanted.rpartition("/")[2], True)
        ends = [name for name in self._bases if re.search(rf"[-_. ]{re.escape(_key(name, True))}$", last)]
        if ends:
            name = max(ends, key=len)
            return f"it has {name}: take the prefix {last[: -len(name)]!r} out of the tasks"
        choice = [*self.names, *(os.path.splitext(name)[0] for name in (*self.names, *self._bases))]
        near = difflib.get_close_matches(wanted, choice, n=3) if len(choice) < 100_000 else []
        return f"near matches: {', '.join(dict.fromkeys(near))}" if near else f"it has {self.names[0]}, for instance"

    @cached_property
    def _bases(self) -> list[str]:
        return list(dict.fromkeys(name.rpartition("/")[2] for name in self.names))


def _key(name: str, any_case: bool) -> str:
    name = unicodedata.normalize("NFC", name)
    return name.casefold() if any_case else name


def _spellings(task: str) -> list[tuple[str, bool]]:
    """Paths that a task may mean, the likeliest first, and whether they are those of another place."""
    name = _tidy(task)
    foreign = bool(re.match(r"/|[A-Za-z]:/", name))
    url = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", task)
    found = [] if url else [(name, foreign)]
    if url or "?" in task:
        parts = urllib.parse.urlsplit(task)
        found.append((_tidy(urllib.parse.unquote(parts.path)), True))
        inside = urllib.parse.parse_qsl(parts.query)  # where the server of a tool names its file
        found += [(_tidy(value), True) for _, value in inside if "." in value]
    elif "%" in task:
        found.append((_tidy(urllib.parse.unquote(task)), foreign))
    return found


def _tidy(path: str) -> str:
    """With forward slashes, and no steps that lead nowhere."""
    path = path.replace("\\", "/")
    kept = "/".join(part for part in path.split("/") if part not in ("", "."))
    return f"/{kept}" if path.startswith("/") else kept
