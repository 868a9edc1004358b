"""Checks of options, by keyword: every error names the option, its value and what it may be."""

from __future__ import annotations

from typing import Any, get_args


def check_choice(known: Any, **options: object) -> None:
    """A ValueError for an option that is none of the words of ``known``, a ``Literal``."""
    for name, value in options.items():
        if value not in get_args(known):
            raise ValueError(f"{name}={value!r} is unknown: use one of {', '.join(map(str, get_args(known)))}")


def check_integer(least: int, **options: object) -> None:
    """A ValueError for an option that is no integer of ``least`` or more."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            must = "a positive integer" if least == 1 else f"an integer, {least} or more"
            raise ValueError(f"{name}={value!r} must be {must}")


def check_amount(why: str = "", **options: float) -> None:
    """A ValueError for an option that is negative or not finite; ``why`` follows a colon."""
    for name, value in options.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name}={value!r} must be finite and 0 or more{why and f': {why}'}")
