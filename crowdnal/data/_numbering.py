"""Numbering the distinct texts of an Arrow column, in order of first appearance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from crowdnal.data._vocabulary import Array

_library = torch.library.Library("crowdnal", "FRAGMENT")
_library.define("number_texts(Tensor[] contents, Tensor[] ends) -> (Tensor, Tensor)")


def number_texts(chunks: Sequence[Any]) -> tuple[Array, list[str]]:
    """Code of each text, and the distinct texts.

    Args:
        chunks: Arrow arrays of text without nulls. A list that nobody else holds is emptied when its texts are needed
            no more, which is before the distinct ones become Python's.
    """
    import pyarrow as pa

    held = [chunk for chunk in chunks if len(chunk)]
    if isinstance(chunks, list):
        chunks.clear()
    if not held:
        return np.empty(0, dtype=np.int64), []
    contents, ends = zip(*map(_buffers, held), strict=True)
    codes, first = (found.numpy() for found in torch.ops.crowdnal.number_texts(list(contents), list(ends)))
    starts = np.cumsum([0, *map(len, held)])
    at = np.searchsorted(first, starts)
    pieces = [chunk.take(pa.array(first[at[c] : at[c + 1]] - starts[c])) for c, chunk in enumerate(held)]
    del held, contents, ends
    pa.default_memory_pool().release_unused()
    return codes, [text for piece in pieces for text in texts_of(piece)]


def texts_of(array: Any) -> list[str]:
    """Python's of an Arrow array of text, quicker than its own."""
    texts: list[str] = array.to_numpy(zero_copy_only=False).tolist()
    return texts


def first_rows(codes: Array) -> Array:
    """The rows whose code is greater than all before: where each stands first, if they are numbered by appearance."""
    rows, most = [], -1
    for start in range(0, len(codes), _PIECE):
        seen = np.maximum.accumulate(np.append(most, codes[start : start + _PIECE]))
        rows.append(np.flatnonzero(seen[1:] > seen[:-1]) + start)
        most = int(seen[-1])
    return np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)


_PIECE = 1 << 15  # rows looked at together, so that they stay in the processor's cache


def _buffers(chunk: Any) -> tuple[Tensor, Tensor]:
    """The bytes of an array's texts, and where each ends, in front of that where the first begins; nothing copied."""
    import pyarrow as pa

    _, offsets, content = chunk.buffers()
    kind = pa.int64() if pa.types.is_large_string(chunk.type) else pa.int32()
    ends = pa.Array.from_buffers(kind, len(chunk) + 1, [None, offsets], offset=chunk.offset)
    size = 0 if content is None else content.size
    bytes_ = pa.Array.from_buffers(pa.uint8(), size, [None, content]) if size else pa.array([], pa.uint8())
    return from_dlpack(bytes_), from_dlpack(ends)


def _by_arrow(contents: list[Tensor], ends: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The op where there is no native library."""
    import pyarrow as pa

    pieces = []
    for content, end in zip(contents, ends, strict=True):
        kind = pa.large_binary() if end.dtype == torch.int64 else pa.binary()
        buffers = [pa.py_buffer(part.contiguous().numpy()) for part in (end, content)]
        pieces.append(pa.Array.from_buffers(kind, len(end) - 1, [None, *buffers]))
    encoded = pa.chunked_array(pieces).dictionary_encode()
    codes = np.concatenate(
        [piece.indices.to_numpy(zero_copy_only=False) for piece in encoded.chunks], dtype=np.int64, casting="safe"
    )
    return torch.from_numpy(codes), torch.from_numpy(first_rows(codes))


_library.impl("number_texts", _by_arrow, "CompositeExplicitAutograd")
