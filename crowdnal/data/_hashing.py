"""Numbering the distinct texts of a long Arrow column: 8 bytes at a time instead of text by text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from crowdnal.data._vocabulary import Array

_LONGEST = 64  # bytes of a text, beyond which Arrow's own way is as quick
_PIECE = 1 << 15  # rows looked at together, so that they stay in the processor's cache
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
    pieces = [chunk[at : at + _PIECE] for chunk in chunks for at in range(0, len(chunk), _PIECE)]
    starts = np.cumsum([0, *map(len, pieces)]).tolist()
    mixed = np.empty(starts[-1], dtype=np.uint64)
    for piece, start in zip(pieces, starts, strict=False):
        size, words = _words(piece)
        if len(words) > _LONGEST // 8:
            return None
        mixed[start : start + len(piece)] = _mix(size, words)
    codes, _ = factorize(mixed)
    codes = codes.astype(np.int64, copy=False)
    del mixed, _
    first = first_rows(codes)
    at = np.searchsorted(first, starts)
    known: list[Array] = []  # size and words of the first text of each number so far
    for p, (piece, start) in enumerate(zip(pieces, starts, strict=False)):
        size, words = _words(piece)
        fresh, here = first[at[p] : at[p + 1]] - start, codes[start : start + len(piece)]
        while len(known) < 1 + len(words):
            known.append(np.zeros(len(first), dtype=np.uint64))
        for n, whole in enumerate(known):
            part = size if n == 0 else words[n - 1] if n <= len(words) else np.zeros_like(size)
            whole[at[p] : at[p + 1]] = part[fresh]
            if not np.array_equal(whole[here], part):
                return None
    return codes, first


def first_rows(codes: Array) -> Array:
    """The rows whose code is greater than all before: where each stands first, if they are numbered by appearance."""
    rows, most = [], -1
    for start in range(0, len(codes), _PIECE):
        seen = np.maximum.accumulate(np.append(most, codes[start : start + _PIECE]))
        rows.append(np.flatnonzero(seen[1:] > seen[:-1]) + start)
        most = int(seen[-1])
    return np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)


def _words(piece: Any) -> tuple[Array, list[Array]]:
    """How long each text is, and its bytes as numbers, 8 in each."""
    start, size, data = _bounds(piece)
    count = -(-int(size.max(initial=0)) // 8)
    words = [] if count > _LONGEST // 8 else [_word(data, start, size, 8 * at) for at in range(count)]
    return size.astype(np.uint64), words or [np.zeros(len(size), dtype=np.uint64)] * count


def _mix(size: Array, words: list[Array]) -> Array:
    """A hash that does not depend on how many words of zeros follow the text's own."""
    mixed = size.copy()
    for at, word in enumerate(words):
        turned = (word + np.uint64(at + 1)) * np.uint64(_ODD[0])
        turned ^= turned >> np.uint64(29)
        mixed = np.where(size > 8 * at, (mixed ^ turned) * np.uint64(_ODD[1]), mixed)
    mixed ^= mixed >> np.uint64(32)
    result: Array = mixed * np.uint64(_ODD[0])
    return result


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
