"""Numbering the distinct texts of a long Arrow column: 8 bytes at a time instead of text by text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from crowdnal.data._vocabulary import Array

_LONGEST = 64  # bytes of a text, beyond which Arrow's own way is as quick
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], dtype=np.uint64)
_ODD = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # as in xxHash: odd numbers whose bits look random


def number_texts(chunks: Sequence[Any]) -> tuple[Array, Array] | None:
    """Code of each text in order of first appearance, and the rows where each appears first.

    Texts are compared by their bytes: 64-bit hashes are numbered, and every text is compared with the first that has
    its number.

    Args:
        chunks: Arrow arrays of text without nulls.

    Returns:
        None where a text is long, a hash means two texts, or pandas is not there.
    """
    try:
        from pandas import factorize
    except ImportError:
        return None
    bounds = [_bounds(chunk) for chunk in chunks]
    longest = max((int(size.max()) for _, size, _ in bounds if len(size)), default=0)
    if longest > _LONGEST:
        return None
    size = np.concatenate([size for _, size, _ in bounds])
    words = [
        np.concatenate([_word(data, start, length, 8 * at) for start, length, data in bounds])
        for at in range(-(-longest // 8))
    ]
    mixed = size.astype(np.uint64)
    for word in words:
        mixed = (mixed ^ word) * np.uint64(_ODD[0])
        mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(_ODD[1])
    codes, found = factorize(mixed)
    codes = codes.astype(np.int64, copy=False)
    del mixed
    first = np.full(len(found), len(codes), dtype=np.int64)
    seen = np.maximum.accumulate(codes)
    fresh = np.flatnonzero(np.append(True, seen[1:] > seen[:-1])) if len(codes) else codes
    first[codes[fresh]] = fresh
    for part in (size, *words):
        if not np.array_equal(part[first][codes], part):
            return None
    return codes, first


def _bounds(chunk: Any) -> tuple[Array, Array, Array]:
    """Where each text of an array starts, how long it is, and the bytes, with 8 more behind them."""
    _, offsets, content = chunk.buffers()
    kind = np.int64 if str(chunk.type) == "large_string" else np.int32
    ends = np.frombuffer(offsets, dtype=kind)[chunk.offset : chunk.offset + len(chunk) + 1]
    low, high = (int(ends[0]), int(ends[-1])) if len(chunk) else (0, 0)
    data = np.zeros(high - low + 8, dtype=np.uint8)
    if high > low:
        data[:-8] = np.frombuffer(content, dtype=np.uint8)[low:high]
    return ends[:-1].astype(np.int64) - low, np.diff(ends).astype(np.int64), data


def _word(data: Array, start: Array, size: Array, at: int) -> Array:
    """Bytes ``at`` to ``at + 8`` of each text as a number, zeros behind its end."""
    every = np.ndarray((len(data) - 7,), dtype="<u8", buffer=data.data, strides=(1,))
    left = np.clip(size - at, 0, 8)
    word: Array = every[np.minimum(start + at, len(every) - 1)]
    return word & _MASKS[left]
