"""An objective at the command line: its options, typed by its constructor, and its docstring as plain text."""

from __future__ import annotations

import inspect
import re
import textwrap
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from crowdnal.ccc import CCC
from crowdnal.objectives import OBJECTIVES, Objective
from crowdnal.train.config import AUTO, InputError

# What the command itself decides: sizes by the data, gradients by its dense optimizers, one number a step to minimise
_DECIDED = ("num_classes", "num_annotators", "num_labels", "sparse_grad", "feature_dim")
_NUMBERS = Sequence[float]
_NO_LOSS = "none"  # the reduction that gives no number to minimise
_REDUCTION = (
    "of a batch's losses: their mean over labels, their sum, or over items of the mean (item_mean) or the sum "
    "(per_item) of each"
)


Method = Objective | CCC
"""What a run can train with."""


def methods() -> list[str]:
    """Names of the objectives, and of what trains by a step of its own."""
    return sorted([*OBJECTIVES, CCC.name])


def objective_class(name: str, argument: str = "--objective") -> type[Method]:
    """The objective of this name.

    Raises:
        InputError: there is none.
    """
    if name == CCC.name:
        return CCC
    if name not in OBJECTIVES:
        raise InputError(f"{argument} {name!r} is unknown: use one of {', '.join([*methods(), AUTO])}")
    return OBJECTIVES[name]


def option_types(cls: type) -> dict[str, Any]:
    """The options of an objective that a word can give, and their types."""
    found = {}
    for name, parameter in inspect.signature(cls, eval_str=True).parameters.items():
        hint = parameter.annotation
        if name == "reduction":
            hint = Literal[tuple(value for value in typing.get_args(hint) if value != _NO_LOSS)]
        if name not in _DECIDED and _is_a_word(hint):
            found[name] = hint
    return found


def parse_options(cls: type, options: tuple[str, ...]) -> dict[str, Any]:
    """``KEY=VALUE`` words as keyword arguments of a class, typed by its constructor's annotations.

    Raises:
        InputError: unknown key (listing the valid ones), or a value of another type.
    """
    known = option_types(cls)
    values: dict[str, Any] = {}
    for option in options:
        key, equals, text = option.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            raise InputError(f"--option {option!r} must be KEY=VALUE")
        if key not in known:
            valid = ", ".join(f"{name} ({_type_words(hint)})" for name, hint in known.items())
            raise InputError(f"--option {key!r} is unknown to {getattr(cls, 'name', cls.__name__)}: it takes {valid}")
        try:
            values[key] = _convert(text.strip(), known[key])
        except ValueError:
            raise InputError(f"--option {key}={text!r} must be {_type_words(known[key])}") from None
    return values


def resolved_options(cls: type, given: dict[str, Any]) -> dict[str, Any]:
    """All options of an objective with their values: those given, and the defaults of the others."""
    parameters = inspect.signature(cls).parameters
    return {name: given.get(name, parameters[name].default) for name in option_types(cls)}


def _parts(hint: Any) -> tuple[Any, ...]:
    """The types of a union; a tensor that may also be a word is a word here."""
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    words = tuple(part for part in parts if part is not Tensor)
    return words if any(part is not type(None) for part in words) else parts


def _is_a_word(hint: Any) -> bool:
    words = (int, float, bool, str, type(None), _NUMBERS)
    return all(part in words or typing.get_origin(part) is Literal for part in _parts(hint))


def _convert(text: str, hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        for value in arguments:
            if str(value) == text:
                return value
        raise ValueError
    if hint == _NUMBERS:
        return [float(number) for number in text.split(",")]
    if origin in (typing.Union, types.UnionType):
        if type(None) in arguments and text.lower() in ("none", ""):
            return None
        for candidate in _parts(hint):
            if candidate is not type(None):
                try:
                    return _convert(text, candidate)
                except ValueError:
                    continue
        raise ValueError
    if hint is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() not in words:
            raise ValueError
        return words[text.lower()]
    return hint(text)


def _type_words(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + "|".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if a is type(None) else _type_words(a) for a in _parts(hint))
    if hint == _NUMBERS:
        return "numbers with commas between"
    return {bool: "true|false", int: "an integer", float: "a number", str: "text"}[hint]


def value_words(value: Any) -> str:
    """A value of an option as one writes it after ``KEY=``."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


# Plain text


def summary(cls: type) -> str:
    """The first sentence of a class's docstring."""
    return " ".join(plain(inspect.getdoc(cls) or "").partition("\n\n")[0].split())


def facts(cls: type[Method]) -> dict[str, str]:
    """Class, link and, where there is one, source of a method."""
    told = {"class": f"{cls.__module__.partition('.')[0]}.{cls.__name__}", "link": cls.link, "source": cls.source}
    return {word: plain(text) for word, text in told.items() if text}


def option_help(cls: type, width: int = 100) -> str:
    """The options of an objective: type, default and what the docstring says of each."""
    said: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        said |= _arguments(plain(inspect.cleandoc(base.__dict__.get("__doc__") or "")))
    said["reduction"] = _REDUCTION
    defaults, lines = resolved_options(cls, {}), []
    for name, hint in option_types(cls).items():
        lines.append(f"  {name}={value_words(defaults[name])}  ({_type_words(hint)})")
        lines += textwrap.wrap(said.get(name, ""), width, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines) or "  none"


def description(cls: type) -> str:
    """The docstring without its arguments, as plain text."""
    return re.split(r"^(?:Args|Attributes|Raises|Returns):$", plain(inspect.getdoc(cls) or ""), flags=re.M)[0].strip()


def plain(text: str) -> str:
    """A docstring's reStructuredText as plain text."""
    text = re.sub(r":\w+:`~[\w.]*?(\w+)`", r"\1", text)
    text = re.sub(r"``([^`\n]+)``( {2,})", r"\1\2    ", text)  # in a table the columns stay where they are
    pieces = re.split(r"(?::\w+:)?`([^`]+)`", text.replace("``", "`"))  # prose and code by turns
    pieces[::2] = [re.sub(r"(?<![\w*])(\*\*?)(\w[^*\n]*)\1", r"\2", prose) for prose in pieces[::2]]
    text = "".join(pieces)
    return re.sub(r"::$", ":", re.sub(r"^=[= ]+=\n?", "", text, flags=re.M), flags=re.M)


def _arguments(doc: str) -> dict[str, str]:
    """What the ``Args:`` of a plain docstring say of each name."""
    block = re.search(r"^Args:\n((?:(?: {4}.*)?\n?)*)", doc, flags=re.M)
    parts = re.split(r"^ {4}(\w+): ", block[1], flags=re.M) if block else [""]
    return {name: " ".join(text.split()) for name, text in zip(parts[1::2], parts[2::2], strict=True)}
