"""Checks of options, by keyword: every error names the option, its value and what it may be."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
_KINDS: dict[Any, type] = {
    int: numbers.Integral,
    float: numbers.Real,
    bool: bool,
    str: str,
    Tensor: Tensor,
    NoneType: NoneType,
    torch.dtype: torch.dtype,
}

_NAMES = {kind: {"Integral": "int", "Real": "float", "NoneType": "None"}.get(kind.__name__, kind.__name__)
         for kind in _KINDS.values()}  # fmt: skip


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


def check_positive(**options: float) -> None:
    """A ValueError for an option that is not above 0, or not finite."""
    for name, value in options.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name}={value!r} must be above 0 and finite")


def check_types(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> None:
    """A ValueError for an argument that is not what it is annotated as, so far as that is plain types."""
    for name, value in given.items():
        kinds = _kinds(parameters[name].annotation) if name in parameters else None
        if kinds and not (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))):
            said = repr(value)
            shown = said if len(said) < 60 else f"{said[:60]}..."
            must = " or ".join(sorted(_NAMES[kind] for kind in kinds))
            raise ValueError(f"{name}={shown} must be {must}, got {type(value).__name__}")


@functools.cache
def _kinds(annotation: Any) -> tuple[type, ...]:
    """What `isinstance` asks; nothing where any value may fit."""
    if get_origin(annotation) in (Union, UnionType):
        parts = [_kinds(part) for part in get_args(annotation)]
        return sum(parts, ()) if all(parts) else ()
    return (_KINDS[annotation],) if annotation in _KINDS else ()


def typed(function: Callable[P, T]) -> Callable[P, T]:
    """A function whose arguments are checked by `check_types`."""
    parameters: Mapping[str, inspect.Parameter] | None = None

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal parameters
        if parameters is None:
            parameters = inspect.signature(function, eval_str=True).parameters
        check_types(parameters, {**dict(zip(parameters, args, strict=False)), **kwargs})
        return function(*args, **kwargs)

    return checked
