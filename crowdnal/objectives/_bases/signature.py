"""All options of a class: those it names and those it hands on with ``**common: Unpack[...]``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from inspect import Parameter, Signature
from typing import Any, Unpack, get_args, get_origin

_ARGS = re.compile(r"^Args:\n(?:(?: {4}.*)?\n)*", re.M)
_ENTRY = re.compile(r"^    (\w+): .*(?:\n {5,}.*)*\n", re.M)


def full_signature(cls: type, parts: Iterable[type] = ()) -> Signature:
    """The constructor's signature, in which options that it hands on stand as the class that takes them has them.

    Args:
        cls: whose constructor may end in ``**name: Unpack[SomeTypedDict]``.
        parts: classes that take them where the base class does not.
    """
    signature = _signature(cls.__init__)  # type: ignore[misc]
    _, *parameters = signature.parameters.values()
    if not parameters or get_origin(parameters[-1].annotation) is not Unpack:
        return signature.replace(parameters=parameters)
    options = get_args(parameters.pop().annotation)[0]
    handed: dict[str, Parameter] = {}
    for taker in (cls.__mro__[1], *parts):
        handed = {**_signature(taker).parameters, **handed}
    names = options.__required_keys__ | options.__optional_keys__
    return signature.replace(parameters=[*parameters, *(p for name, p in handed.items() if name in names)])


def _signature(call: Any) -> Signature:
    try:
        return inspect.signature(call, eval_str=True)
    except NameError:  # annotated with names from within a function
        return inspect.signature(call)


def full_doc(cls: type) -> str | None:
    """The docstring, whose ``Args:`` also have what base classes say of options that it does not describe."""
    own = cls.__dict__.get("__doc__")
    if own is None:
        return None
    doc = inspect.cleandoc(own) + "\n"
    described, missing = _entries(doc), ""
    for name in inspect.signature(cls).parameters:
        said = [_entries(inspect.cleandoc(base.__doc__ or "") + "\n").get(name) for base in cls.__mro__[1:]]
        if name not in described:
            missing += next(filter(None, said), "")
    if not missing:
        return doc
    doc = doc if _ARGS.search(doc) else f"{doc}\nArgs:\n"
    return _ARGS.sub(lambda block: f"{(kept := block[0].rstrip())}\n{missing.rstrip()}{block[0][len(kept) :]}", doc)


def _entries(doc: str) -> dict[str, str]:
    """What the ``Args:`` say of each name, the lines as they are."""
    block = _ARGS.search(doc)
    return {entry[1]: entry[0] for entry in _ENTRY.finditer(block[0])} if block else {}
