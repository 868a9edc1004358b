"""What the cells of a label column mean: which are no label, which are numbers, what order classes have."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any, Final

import numpy as np

from crowdnal._utils.warn import warn
from crowdnal.data._columns import Column, is_missing
from crowdnal.data._vocabulary import Array, Ids, distinct, in_natural_order, is_number


class _Usual:
    def __repr__(self) -> str:
        return "the usual ones"


USUAL: Final[Any] = _Usual()
"""Default of ``missing=``: None, NaN, pd.NA; in files the usual words; in matrices without these also -1."""

_NAN = frozenset({"nan", "-nan", "<na>", "#n/a"})
WORDS = _NAN | {"na", "n/a", "null", "none"}
_DOUBTFUL = frozenset(
    {"?", "skip", "skipped", "ignore", "ignored", "discarded", "unsure", "not sure", "don't know", "dont_know", "idk"}
)


def markers(missing: Any) -> list[Any]:
    """One or several markers as a list."""
    if missing is USUAL or missing is None:
        return []
    out = [missing]
    if not isinstance(missing, (str, bytes)) and hasattr(missing, "__iter__"):
        out = missing.tolist() if hasattr(missing, "tolist") and missing.ndim else list(missing)
    for marker in out:
        if not isinstance(marker, Hashable):
            raise ValueError(f"missing={marker!r} is no label that could mean none: give a label, or a list of them")
    return out


def one_or_several(values: Any, name: str) -> tuple[Hashable, ...]:
    """Ids, or a single one, as a tuple."""
    return distinct([values] if isinstance(values, str) or not hasattr(values, "__iter__") else values, name)


def spelled(value: Any) -> Any:
    """How two cells or markers compare that may be number or text: ``-1``, ``-1.0`` and ``"-1"`` are one."""
    number: Any = as_number(value) if isinstance(value, str) else value
    if is_number(number) and not is_missing(number):
        return str(int(number)) if np.isfinite(float(number)) and number % 1 == 0 else str(number)
    return value.strip() if isinstance(value, str) else value


def as_number(text: str) -> int | float | None:
    """The number that a text spells as a program writes it, never rounded; None for ``007``, ``1_2``, ``1E3``."""
    if len(text) > 300:
        return None
    if whole := re.fullmatch(r"(0|-?[1-9][0-9]*)(\.0+)?", text):
        return int(whole[1])
    if re.fullmatch(r"-?[0-9]\.[0-9]{6,}e[+-][0-9]{2,3}", text):  # C's %e, and numpy.savetxt
        value = float(text)
        return int(value) if value % 1 == 0 else value
    if re.fullmatch(r"-?(0|[1-9][0-9]*)\.[0-9]*[1-9]", text) and repr(float(text)) == text:
        return float(text)
    return None


def drop_missing(
    column: Column, missing: Any, *, written: bool, dense: bool, classes: Ids, apart: Collection[Any] = ()
) -> Column:
    """The column with what is no label as missing.

    Args:
        column: of labels.
        missing: what the caller says is none.
        written: whether it stands in a file, where the usual words mean none too.
        dense: whether it is a matrix, where -1 does, unless empty cells or another number do.
        classes: these are never missing, whatever they are called.
        apart: nor are these, which are no classes.
    """
    kept = {spelled(value) for value in (*apart, *(() if classes is None else distinct(classes, "classes")))}
    marked = {spelled(marker) for marker in markers(missing) if not is_missing(marker)}
    usual = missing is USUAL or bool(markers(missing))
    gone = set()
    if written:
        texts = [value for value in column.values if isinstance(value, str)]
        gone = {v for v in texts if not v.strip() or (usual and _is_usual(v.strip()))}
    empty = bool((column.codes < 0).any()) or bool(gone)
    gone |= {value for value in column.values if spelled(value) in marked}
    if dense and usual and not any(as_number(marker) is not None for marker in marked if isinstance(marker, str)):
        negative = {value for value in column.values if spelled(value) == "-1"}
        if not empty:
            gone |= negative
        elif negative and missing is USUAL and classes is None:
            warn("-1 is read as a class, because empty cells mark what is missing: give missing=-1 if it marks it too")
    gone = {value for value in gone if spelled(value) not in kept}
    result = column.mapped(lambda value: None if value in gone else value) if gone else column
    if missing is USUAL and classes is None and not column.declared:
        _say(gone, result, apart)
    return result


def no_labels(before: Column, after: Column) -> dict[str, int]:
    """What a column says where it has no label any more, "" for nothing, and how often."""
    counts = np.bincount(before.codes[after.codes < 0] + 1, minlength=len(before.values) + 1).tolist()
    found = {"" if u == 0 else str(before.values[u - 1]).strip(): number for u, number in enumerate(counts) if number}
    return dict(sorted(found.items(), key=lambda marker: -marker[1]))


def _is_usual(text: str) -> bool:
    """Of the usual words, ``None`` only as Python writes it: ``NONE`` and ``none`` are classes in real data."""
    return text == "None" or (text.casefold() in WORDS and text.casefold() != "none")


def _say(gone: set[Any], column: Column, apart: Collection[Any]) -> None:
    """Warn where a word could be a class after all, or a class no answer."""
    words = {v for v in gone if isinstance(v, str) and v.strip() and v.strip().casefold() not in _NAN}
    rest = [value for value in column.values if isinstance(value, str) and value not in apart]
    if {v for v in words if spelled(v) != "-1"} and any(as_number(value) is None for value in rest):
        warn(f"{_listed(words)} mean no label here: give missing=() or classes= if they are classes")
    doubtful = {value for value in rest if value.strip().casefold() in _DOUBTFUL | WORDS}
    if doubtful:
        warn(f"{_listed(doubtful)} are read as classes: give missing= if they mean no label, else classes= or unsure=")


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(repr, in_natural_order(values)))


def numbers(column: Column, apart: Collection[Any] = ()) -> Column:
    """Labels of a file: numbers if all of them are (but those apart), else as written, ``1`` and ``1.0`` being one."""
    if not all(isinstance(value, str) for value in column.values):
        return column
    column = column.mapped(str.strip)
    found = [as_number(value) for value in column.values if value not in apart]
    if None not in found:
        kind = float if any(isinstance(number, float) for number in found) else int
        return column.mapped(
            lambda value: value if value in apart else kind(value) if kind is float else as_number(value)
        )
    texts = set(column.values)
    return column.mapped(lambda value: spelled(value) if value.endswith(".0") and spelled(value) in texts else value)


def encode(
    column: Column,
    wanted: Ids,
    name: str,
    *,
    natural: bool,
    place: Callable[[int], str],
    written: bool = False,
    last: tuple[Hashable, ...] = (),
    first: Callable[[int], str] | None = None,
) -> tuple[Array, tuple[Hashable, ...]]:
    """Number each value by its place in ``wanted``, or among those found; also gives all ids. Missing ones stay -1.

    Args:
        column: of ids or labels.
        wanted: the ids in order, if they are given.
        name: of the argument that gives them.
        natural: whether those found are sorted (where their order was not declared), else they stay as they are.
        place: row n in words.
        written: whether the values stand in a file, so that 3 and "3" are one.
        last: values that come after all others.
        first: where value u stands, if no row of the column has it, in words.

    Raises:
        ValueError: for a value that is not wanted, naming the row.
    """
    if wanted is None:
        found = column.values if column.declared or not natural else in_natural_order(column.values)
        if found == column.values and not last:
            return column.codes, tuple(found)
        ids = (*(value for value in found if value not in last), *last)
        written = False  # they are what was written
    else:
        ids = distinct(wanted, name)
        ids += tuple(value for value in last if value not in ids)
    index: dict[Any, int] = {value: i for i, value in enumerate(ids)}
    if written:
        if name == "classes" and not any(as_number(str(value)) is not None for value in ids):
            index = {str(i): i for i in range(len(ids))} | index  # numbers of the named classes
        index = {spelled(value): i for value, i in index.items()} | {str(v): i for v, i in index.items()} | index
    place_of = [index.get(v, index.get(spelled(v), -1) if written else -1) for v in column.values]
    codes = np.array([*place_of, -1], dtype=np.int64)[column.codes]
    bad = (codes < 0) & (column.codes >= 0)
    if name != "classes" and -1 in place_of and not bad.any():  # of rows without a label
        u = place_of.index(-1)
        advice = _advice(column.values, u, ids, name)
        where = "" if first is None else f"{first(u)}: "
        raise ValueError(f"{where}{column.values[u]!r}, of rows without a label, is not in {name}; {advice}")
    if bad.any():
        u = int(column.codes[row := int(bad.argmax())])
        raise ValueError(f"{place(row)}: {column.values[u]!r} is not in {name}; {_advice(column.values, u, ids, name)}")
    return codes, ids


def _advice(found: list[Any], u: int, ids: tuple[Hashable, ...], name: str) -> str:
    numbered = ids == tuple(range(len(ids))) and all(isinstance(value, int) for value in found)
    if numbered and min(found) >= 1 and max(found) == len(ids):
        return f"the values look 1-based: subtract 1, or give the ids themselves as {name}="
    if str(found[u]) in {str(value) for value in ids}:
        return "ids of another type do not match (3 is not '3'): convert one side"
    known = ", ".join(map(str, ids[:12])) + (", ..." if len(ids) > 12 else "")
    return f"add it there or drop the row ({len(ids)} are given: {known})"
