"""Text files as they are found: compression and encoding by content, separator, header, and where each row stands."""

from __future__ import annotations

import bz2
import codecs
import csv
import errno
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import IO, Any

_PACKED: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
_HEAD = 1 << 16


def open_bytes(path: Path) -> IO[bytes]:
    """The content, unpacked where it is packed, whatever the file is called."""
    with path.open("rb") as file:
        magic = file.read(6)
    opener = next((opener for start, opener in _PACKED.items() if magic.startswith(start)), None)
    return path.open("rb") if opener is None else opener(path, "rb")


@contextmanager
def readable(path: Path, *also: type[Exception]) -> Iterator[None]:
    """What goes wrong in reading, in one sentence that names the file; ``also``: what the library below raises."""
    damage: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError, *also)
    try:
        yield
    except damage as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # EINVAL: a place before the file
            raise
        said = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is damaged or cut off ({said}): get it again") from None


@dataclass(frozen=True)
class Text:
    """A text file: how it is encoded and its first part."""

    path: Path
    encoding: str
    head: str
    whole: bool

    def open(self) -> IO[str]:
        """From its beginning, undecodable bytes an error."""
        return io.TextIOWrapper(open_bytes(self.path), encoding=self.encoding, newline="")

    def undecodable(self) -> ValueError:
        """The error that names the line that is not in the encoding."""
        line, what = 1, "its end"
        with open_bytes(self.path) as file:
            decoder = codecs.getincrementaldecoder(self.encoding)()
            for line, raw in enumerate(file, 1):  # noqa: B007
                try:
                    decoder.decode(raw)
                except UnicodeDecodeError as error:
                    what = f"byte {error.object[error.start]:#04x}"
                    break
        return ValueError(
            f"{self.path}, line {line} is not {self.encoding.upper().removesuffix('-SIG')} ({what}): save the file as "
            "UTF-8, or give encoding= (latin-1 and cp1252 are usual)"
        )


def read_head(path: Path, encoding: str | None) -> Text:
    """Detect the encoding by its mark (or UTF-16 by its zeros), else UTF-8, and read the first lines.

    Raises:
        ValueError: naming the file, for what is no text, an unknown encoding or undecodable bytes.
    """
    with readable(path), open_bytes(path) as file:
        raw = file.read(_HEAD)
        while len(raw) % _HEAD == 0 and raw and b"\n" not in raw and (more := file.read(_HEAD)):
            raw += more
        whole = not file.read(1)
    if encoding is None:
        encoding = next((name for mark, name in _MARKS.items() if raw.startswith(mark)), "utf-8-sig")
        zeros = raw[:400].count(0)
        if encoding == "utf-8-sig" and zeros > len(raw[:400]) / 3:
            encoding = "utf-16-le" if raw[1:2] == b"\0" else "utf-16-be"
        elif encoding == "utf-8-sig" and zeros:
            raise ValueError(f"{path} is not a text file: a table must be CSV, Parquet or JSON")
    try:
        decoder = codecs.getincrementaldecoder(encoding)()
    except LookupError:
        raise ValueError(f"encoding={encoding!r} is unknown: utf-8, utf-16 and latin-1 are usual") from None
    try:
        text = decoder.decode(raw, final=whole)
    except UnicodeDecodeError:
        raise Text(path, encoding, "", whole).undecodable() from None
    return Text(path, encoding, text, whole)


@dataclass(frozen=True)
class Dialect:
    """How a text file is a table. ``separator`` None: cells are separated by blanks; "": one cell per line.

    ``header`` is the first row, wherever the names come from; ``skip`` lines (Excel's ``sep=``) come before it.
    """

    separator: str | None
    header: list[str]
    skip: int = 0
    quoted: bool = True

    def rows(self, lines: Any, strict: bool = False) -> Iterator[tuple[int, list[str]]]:
        """Line number and cells of every row that is not blank, the header's too."""
        for _ in range(self.skip):
            next(iter(lines))
        if not self.separator:
            for number, line in enumerate(lines, 1 + self.skip):
                if line.strip():
                    yield number, line.split() if self.separator is None else [line.strip()]
            return
        reader = csv.reader(
            lines,
            delimiter=self.separator,
            skipinitialspace=True,
            quoting=csv.QUOTE_MINIMAL if self.quoted else csv.QUOTE_NONE,
            strict=strict,
        )
        before = csv.field_size_limit(sys.maxsize)
        try:
            end = 0
            for cells in reader:
                inside = sum(cell.count("\n") for cell in cells)
                number, end = max(reader.line_num - inside, end + 1), reader.line_num
                if len(cells) > 1 or (cells and cells[0].strip()):
                    yield number + self.skip, [cell.strip() for cell in cells]
        finally:
            csv.field_size_limit(before)


def read_dialect(text: Text, names: Sequence[str], separator: str | None, *, blanks: bool) -> Dialect:
    """The separator under which the first lines have the wanted names, else the most regular one.

    Args:
        text: the file.
        names: of the columns wanted.
        separator: if it is known.
        blanks: whether cells may be separated by blanks, as in a matrix of numbers.

    Raises:
        ValueError: the file is empty.
    """
    head = text.head if text.whole else text.head[: text.head.rfind("\n") + 1] or text.head
    head = head.lstrip("\ufeff")
    skip = 0
    if head[:4].lower() == "sep=":
        separator, skip = separator or head[4:5].strip("\r\n") or None, 1
    if not "".join(head.splitlines(True)[skip:]).strip():
        raise ValueError(f"{text.path} is empty: it must hold a table with a row per answer or per item")
    best, score = Dialect("", []), (-1, 0.0, 0)
    for mark in (separator,) if separator else (",", "\t", ";", "|"):
        dialect = Dialect(mark, [], skip)
        try:
            rows = [cells for _, cells in zip_some(dialect.rows(io.StringIO(head, newline="")))]
        except csv.Error:
            rows = [line.split(mark) for line in head.splitlines()[skip:] if line.strip()][:100]
        if not rows:
            continue  # cells of separators alone
        width = len(rows[0])
        regular = sum(len(cells) == width for cells in rows) / len(rows)
        found = sum(name in rows[0] for name in names)
        value = (found, float(regular > 0.5), width if mark != "|" or found else 1)
        if (width > 1 or separator) and value > score:
            best, score = replace(dialect, header=rows[0]), value
    if not best.separator:
        first = next(line for line in head.splitlines()[skip:] if line.strip())
        best = Dialect(None, first.split(), skip) if blanks else Dialect("", [first.strip()], skip)
    return best


def zip_some(rows: Iterator[tuple[int, list[str]]], count: int = 100) -> Iterator[tuple[int, list[str]]]:
    """The first rows."""
    for _, row in zip(range(count), rows, strict=False):
        yield row


def read_lines(path: str | PathLike[str]) -> list[str]:
    """The lines of a text file that are not blank.

    Raises:
        ValueError: it is no text.
    """
    text = read_head(Path(path), None)
    try:
        with readable(text.path), text.open() as file:
            return [line.strip() for line in file if line.strip()]
    except UnicodeDecodeError:
        raise text.undecodable() from None
