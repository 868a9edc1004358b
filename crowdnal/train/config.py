"""What a training run is: its arguments, their defaults, and the command that repeats it."""

from __future__ import annotations

import inspect
import os
import shlex
import types
import typing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

FORMATS = ("auto", "long", "dense")
SCHEDULES = ("constant", "cosine")
AUGMENTATIONS = ("standard", "light", "none")

# Arguments that change where and how fast a run computes, never what: a resumed run may differ in them.
_FREE = frozenset({"out", "workers", "feature_cache"})

# The head on frozen features: a small convex-ish problem, where dropout on the features is the regulariser. Chosen by
# the likelihood of held-out annotations, never by clean labels (README, "Defaults").
OBJECTIVE_LR = 10.0  # times lr: an annotator's matrix sees only that annotator's few labels, and starts undecided
_FROZEN: dict[str, Any] = {
    "epochs": 40, "batch_size": 64, "lr": 1e-3, "weight_decay": 0.0, "optimizer": "adam", "drop_rate": 0.5,
    "schedule": "constant",
}  # fmt: skip
_FINE_TUNE: dict[str, Any] = {
    "epochs": 20, "batch_size": 64, "lr": 1e-4, "weight_decay": 0.05, "optimizer": "adamw", "drop_rate": 0.0,
    "schedule": "cosine",
}  # fmt: skip
_SCRATCH: dict[str, Any] = {**_FINE_TUNE, "epochs": 60, "lr": 1e-3}


class InputError(ValueError):
    """Something the user gave is wrong; the message says what, where and how to mend it, in one line."""


@dataclass(frozen=True)
class TrainConfig:
    """Arguments of :func:`crowdnal.train.run`; the command line has the same under the same names.

    Where ``None`` is a number's default, :meth:`resolved` fills it in, depending on whether the backbone is frozen
    and whether it starts from given weights.
    """

    images: Path
    annotations: Path
    out: Path
    model: str
    objective: str = "crowd-layer"
    options: tuple[str, ...] = ()
    format: Literal["auto", "long", "dense"] = "auto"
    items: Path | None = None
    task_column: str = "task"
    worker_column: str = "worker"
    label_column: str = "label"
    missing: str | None = None
    classes: tuple[str, ...] | None = None
    weights: str | None = None
    pretrained: bool = False
    image_size: int | None = None
    augment: Literal["standard", "light", "none"] = "standard"
    freeze_backbone: bool = False
    feature_cache: Path | None = None
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    objective_lr: float | None = None
    weight_decay: float | None = None
    optimizer: str | None = None
    drop_rate: float | None = None
    schedule: Literal["constant", "cosine"] | None = None
    holdout: float = 0.0
    test_images: Path | None = None
    test_labels: Path | None = None
    test_items: Path | None = None
    truth: Path | None = None
    seed: int = 0
    workers: int | None = None
    threads: int | None = None
    device: str | None = None
    amp: bool = False

    def resolved(self) -> TrainConfig:
        """With every default filled in, checked.

        Raises:
            InputError: naming the argument.
        """
        defaults = _FROZEN if self.freeze_backbone else _FINE_TUNE if self._has_weights() else _SCRATCH
        filled = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        if self.workers is None:
            filled["workers"] = 0 if available_cores() == 1 else min(available_cores(), 8)
        if self.device is None:
            filled["device"] = _default_device()
        config = replace(self, **filled)
        if config.objective_lr is None and config.lr is not None:
            config = replace(config, objective_lr=OBJECTIVE_LR * config.lr)
        config._check()
        return config

    def _has_weights(self) -> bool:
        return self.pretrained or self.weights is not None

    def _check(self) -> None:
        for name, known in (("format", FORMATS), ("schedule", SCHEDULES), ("augment", AUGMENTATIONS)):
            if getattr(self, name) not in known:
                raise InputError(f"--{name} {getattr(self, name)!r} is unknown: use one of {', '.join(known)}")
        for name in ("epochs", "batch_size", "image_size", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{flag(name)} {value} must be 1 or more")
        for name in ("weight_decay", "workers", "seed"):
            if getattr(self, name) < 0:
                raise InputError(f"{flag(name)} {getattr(self, name)} must be 0 or more")
        for name in ("lr", "objective_lr"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"{flag(name)} {getattr(self, name)} must be above 0")
        for name in ("drop_rate", "holdout"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{flag(name)} {getattr(self, name)} must be at least 0 and below 1")
        if self.weights is not None and self.pretrained:
            raise InputError("--weights and --pretrained exclude each other: give one of them")
        if (self.test_images is None) != (self.test_labels is None):
            raise InputError("--test-images and --test-labels go together: give both or neither")
        if self.classes is not None and len(set(self.classes)) < max(2, len(self.classes)):
            raise InputError(f"--classes {','.join(self.classes)} must be two or more different names")
        for name in ("images", "test_images"):
            path = getattr(self, name)
            if path is not None and not path.is_dir():
                raise InputError(f"{flag(name)} {path} is not a folder")
        for name in ("annotations", "items", "test_labels", "test_items", "truth"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise InputError(f"{flag(name)} {path} is not a file")
        _check_device(str(self.device))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    def difference(self, other: dict[str, Any]) -> str | None:
        """The first argument in which another run (its ``to_dict``) would compute something else, in words."""
        for name, value in self.to_dict().items():
            if name not in _FREE and other.get(name) != value:
                return f"{flag(name)}: it was {_words(other.get(name))}, now {_words(value)}"
        return None

    def command(self, *, resume: bool = False) -> str:
        """The shell command that runs this configuration."""
        words = ["crowdnal", "train"]
        for f in fields(self):
            value = getattr(self, f.name)
            if value == f.default and f.name not in ("objective",):
                continue
            if f.name == "options":
                words += [word for option in value for word in ("--option", option)]
            elif value is True:
                words.append(flag(f.name))
            else:
                words += [flag(f.name), ",".join(value) if isinstance(value, tuple) else str(value)]
        return shlex.join([*words, "--resume"] if resume else words)


def flag(name: str) -> str:
    """The command-line spelling of a field."""
    return "--option" if name == "options" else "--" + name.replace("_", "-")


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def parse_options(cls: type, options: tuple[str, ...]) -> dict[str, Any]:
    """``KEY=VALUE`` words as keyword arguments of a class, typed by its constructor's annotations.

    Raises:
        InputError: unknown key (listing the valid ones), or a value of another type.
    """
    parameters = inspect.signature(cls, eval_str=True).parameters
    # by the data, by the dense optimizers
    decided = ("num_classes", "num_annotators", "num_labels", "sparse_grad", "feature_dim")
    known = {
        name: parameter.annotation
        for name, parameter in parameters.items()
        if name not in decided and not _holds_tensor(parameter.annotation)
    }
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


def _holds_tensor(hint: Any) -> bool:
    """Whether an option is a tensor, which no command line can give."""
    return any(getattr(part, "__module__", "").startswith("torch") for part in (hint, *typing.get_args(hint)))


def _convert(text: str, hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        for value in arguments:
            if str(value) == text:
                return value
        raise ValueError
    if origin in (typing.Union, types.UnionType):
        if type(None) in arguments and text.lower() in ("none", ""):
            return None
        for candidate in arguments:
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
    return hint(text) if hint in (int, float, str) else text


def _type_words(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + "|".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if a is type(None) else _type_words(a) for a in arguments)
    names = {bool: "true|false", int: "an integer", float: "a number", str: "text"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {device!r} cannot be used: {str(error).splitlines()[0]}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    return list(value) if isinstance(value, tuple) else value


def _words(value: Any) -> str:
    return "not given" if value in (None, [], False) else str(value)
