"""Files that other libraries read, NumPy's and Arrow's: what goes wrong in there names the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from crowdnal._utils.extras import require
from crowdnal.data._dense import Matrix, as_matrix_of
from crowdnal.data._text import readable

NUMPY, ARROW, PARQUET = b"\x93NUMPY", b"ARROW1", b"PAR1"


def magic_of(path: Path) -> bytes:
    """The first bytes of a file: ``NUMPY``, ``ARROW``, ``PARQUET`` or those of something else."""
    with path.open("rb") as file:
        magic = file.read(6)
    return PARQUET if magic.startswith(PARQUET) else magic


def read_npy(path: Path) -> Matrix:
    """A matrix as ``numpy.save`` writes it.

    Raises:
        ValueError: naming the file: it is damaged, or holds something else.
    """
    with readable(path, ValueError, TypeError, ArithmeticError, SyntaxError, TokenError):
        matrix = np.load(path, allow_pickle=False)
    return as_matrix_of(path, matrix)


def read_arrow(
    path: Path, magic: bytes, needed: Sequence[Any] = (), progress: Callable[[int], None] | None = None
) -> Any:
    """The table of a Parquet or Feather file, of these columns alone where Parquet has them all.

    Args:
        path: of the file.
        magic: its first bytes.
        needed: columns: the task's, then others.
        progress: is told how many bytes of a Parquet file have been read.

    Raises:
        ValueError: naming the file, which is damaged.
    """
    arrow = require("pyarrow", extra="train")
    with readable(path, arrow.ArrowException, UnicodeDecodeError):
        if magic == ARROW:
            table = require("pyarrow.feather", extra="train").read_table(path)
        else:
            table = _read_parquet(path, needed, progress)
            arrow.default_memory_pool().release_unused()  # of unpacking
        table.validate(full=True)
        _ = table.column_names  # of bytes that may be no text
    return table


def _read_parquet(path: Path, needed: Sequence[Any], progress: Callable[[int], None] | None) -> Any:
    """Row group by row group. Text comes by its distinct values, but for tasks, which are too many for that."""
    arrow, parquet = require("pyarrow", extra="train"), require("pyarrow.parquet", extra="train")
    with path.open("rb") as raw:
        schema = parquet.read_schema(raw)
        wanted = [name for name in needed if name in schema.names]
        columns = wanted if wanted and len(wanted) == len(needed) else schema.names
        kinds = (arrow.string(), arrow.large_string())
        texts = [name for name in needed[1:] if name in columns and schema.field(name).type in kinds]
        raw.seek(0)
        file, size, parts = parquet.ParquetFile(raw, read_dictionary=texts), path.stat().st_size, []
        groups = file.num_row_groups
        for group in range(groups):
            parts.append(file.read_row_group(group, columns))
            if progress is not None:
                progress(size * (group + 1) // groups)
        return arrow.concat_tables(parts) if parts else file.read(columns)
