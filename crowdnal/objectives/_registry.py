"""Which objectives there are: every class of this package that ``@register`` names, and those of other packages.

Another package offers one by an entry point of the same name, loaded when that name is asked for::

    [project.entry-points."crowdnal.objectives"]
    my-method = "my_package.my_method:MyMethod"
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from crowdnal.objectives._bases.base import Objective

GROUP = "crowdnal.objectives"
T = TypeVar("T", bound=type[Objective])
_known: dict[str, type[Objective]] = {}


def register(name: str, *, link: str, source: str = "") -> Callable[[T], T]:
    """Decorator that makes a class an objective of this name: for ``create``, the command and the table of methods.

    Args:
        name: lower case with hyphens.
        link: how class probabilities p become those of a label, or what is minimised, in one line.
        source: authors and year.

    Raises:
        ValueError: another class has this name.
    """

    def add(cls: T) -> T:
        other = _known.get(name, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"objective {name!r} is {_path(other)}, {_path(cls)} needs another name")
        cls.name, cls.link, cls.source = name, link, source
        _known[name] = cls
        return cls

    return add


class Objectives(Mapping[str, type[Objective]]):
    """The classes by name, in alphabetical order; a class of another package is imported when it is looked up.

    Raises:
        ImportError: naming the package whose objective cannot be loaded, or (whatever is looked up) two that offer the
            same name.
    """

    def __getitem__(self, name: str) -> type[Objective]:
        points = _entry_points(tuple(sys.path))
        if name not in _known and name in points:
            _load(points[name])
        return _known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*_known, *_entry_points(tuple(sys.path))}))

    def __len__(self) -> int:
        return len({*_known, *_entry_points(tuple(sys.path))})


OBJECTIVES: Mapping[str, type[Objective]] = Objectives()


def create(name: str, **kwargs: Any) -> Objective:
    """The objective registered as ``name`` (a key of ``OBJECTIVES``), made with ``kwargs``.

    Raises:
        ValueError: unknown name, or an option that this objective does not have.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"objective {name!r} is unknown: use one of {', '.join(OBJECTIVES)}")
    cls = OBJECTIVES[name]
    options = list(inspect.signature(cls).parameters)
    for option in kwargs:
        if option not in options:
            raise ValueError(f"objective {name!r} has no option {option!r}: it takes {', '.join(options)}")
    return cls(**kwargs)


def table(*, plugins: bool = False) -> str:
    """The methods as a Markdown table; ``plugins``: those of other packages too."""
    rows = ["| `--objective` | class | link | source |", "| --- | --- | --- | --- |"]
    for name in OBJECTIVES:
        if plugins or (name in _known and _own(_known[name])):
            cls = OBJECTIVES[name]
            rows.append(f"| `{name}` | `{cls.__name__}` | {cls.link} | {cls.source} |".replace("  ", " "))
    return "\n".join(rows)


def discover(package: str) -> None:
    """Imports the modules of a package, which registers their methods; those that start with "_" have none."""
    for module in pkgutil.walk_packages(sys.modules[package].__path__, f"{package}."):
        if "._" not in module.name:
            importlib.import_module(module.name)


@lru_cache(maxsize=4)
def _entry_points(path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Those installed on this ``sys.path``."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        own = point.name in _known and _own(_known[point.name])
        if own or point.name in found:
            other = "crowdnal" if own else _package(found[point.name])
            raise ImportError(
                f"objective {point.name!r} is offered by {other} and by {_package(point)}: uninstall one of them, or "
                "rename its entry point"
            )
        found[point.name] = point
    return found


def _load(point: EntryPoint) -> None:
    told = f"objective {point.name!r} of {_package(point)} ({point.value})"
    try:
        cls = point.load()
    except Exception as error:
        raise ImportError(f"{told} cannot be loaded: {type(error).__name__}: {error}") from error
    if _known.get(point.name) is not cls:
        raise ImportError(f"{told} is not registered: decorate its class with @register({point.name!r}, link=...)")


def _own(cls: type) -> bool:
    return cls.__module__.startswith(f"{__package__}.")


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _package(point: EntryPoint) -> str:
    return "an unnamed package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
