"""Files that other libraries read, NumPy's and Arrow's: what goes wrong in there names the file."""

from __future__ import annotations

from collections.abc import Sequence
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


def read_arrow(path: Path, magic: bytes, needed: Sequence[Any] = ()) -> Any:
    """The table of a Parquet or Feather file, of these columns alone where Parquet has them all.

    Raises:
        ValueError: naming the file, which is damaged.
    """
    arrow = require("pyarrow", extra="train")
    with readable(path, arrow.ArrowException):
        if magic == ARROW:
            table = require("pyarrow.feather", extra="train").read_table(path)
        else:
            parquet = require("pyarrow.parquet", extra="train")
            with path.open("rb") as file:
                names = parquet.read_schema(file).names
            wanted = [name for name in needed if name in names]
            table = parquet.read_table(path, columns=wanted if wanted and len(wanted) == len(needed) else None)
            arrow.default_memory_pool().release_unused()  # of unpacking
        table.validate(full=True)
    return table
