"""What a training run is. A field of `TrainConfig` is the one place that knows an option of ``crowdnal train``.

Its help, default, check and group stand beside its name and type; the command's parser and help, the table of
`options_table`, the check, what a resumed run may change and the report's numbers read them there.
"""

from __future__ import annotations

import csv
import io
import os
import shlex
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from crowdnal.data.formats import formats

NOT_GIVEN = "not given"

# Groups of the help, with what is said of each.
GROUPS = {
    "data": "",
    "test set": "only reported, never used to choose anything",
    "model": "",
    "objective": "crowdnal objectives lists them; crowdnal objectives NAME tells all about one",
    "training": "where there are three defaults: with a frozen backbone / from given weights / from random weights",
    "running": "",
}


class InputError(ValueError):
    """Something the user gave is wrong; the message says what, where and how to fix it, in one line."""


class ByMode(NamedTuple):
    """A default for each way to train.

    The head on frozen features is a small, nearly convex problem, where dropout on the features is the regulariser.
    Chosen by the likelihood of held-out annotations, never by clean labels.
    """

    frozen: Any
    fine_tune: Any
    scratch: Any

    def __call__(self, config: TrainConfig) -> Any:
        """The default of this configuration."""
        return self.frozen if config.freeze_backbone else self.fine_tune if config.has_weights else self.scratch

    def __str__(self) -> str:
        return " / ".join(in_words(value) for value in (self if len(set(self)) > 1 else self[:1]))


@dataclass(frozen=True)
class Option:
    """What there is to know of an option besides its name, its type and a constant default."""

    group: str  # one of GROUPS
    help: str  # what it is, without its default
    metavar: str | None = None  # stands for the value in the help; None: by the type
    check: Callable[[Any], str | None] | None = None  # what is wrong with a value, as the end of a sentence
    fill: Callable[[TrainConfig], Any] | None = None  # makes the default of a field that is None; its text is shown
    unset: str | None = None  # what the help shows as the default instead
    free: bool = False  # changes where and how fast a run computes, never what: a resumed run may differ in it
    flag: str | None = None  # the spelling on the command line where it is not the name


def option(group: str, help: str, default: Any = None, **more: Any) -> Any:
    """A field of a configuration; see `Option`. Without a default: ``MISSING``."""
    return field(default=default, metadata={"option": Option(group, help, **more)})


def _rule(holds: Callable[[Any], bool], words: str) -> Callable[[Any], str | None]:
    return lambda value: None if holds(value) else words


_is_folder = _rule(Path.is_dir, "is not a folder")
_is_file = _rule(Path.is_file, "is not a file")
_exists = _rule(Path.exists, "does not exist")  # an export may be a folder
_not_empty = _rule(bool, "must not be empty")
_fraction = _rule(lambda value: 0 <= value < 1, "must be at least 0 and below 1")
_positive = _rule(lambda value: 0 < value < float("inf"), "must be above 0")
_not_negative = _rule(lambda value: 0 <= value < float("inf"), "must be 0 or more")
_count = _rule(lambda value: value >= 1, "must be 1 or more")
_folds = _rule(lambda value: value == 0 or 2 <= value <= 100, "must be 2 to 100, or 0 for none")
_names = _rule(lambda names: len(set(names)) >= max(2, len(names)), "must be two or more different names")


def _is_format(name: str) -> str | None:
    known = ("auto", "long", "dense", *formats())
    return None if name in known else f"is unknown: use one of {', '.join(known)}"


def _at_most(most: int) -> Callable[[Any], str | None]:
    """A slip must not ask for more memory or threads than any machine has."""
    return _rule(lambda value: 1 <= value <= most, f"must be 1 to {most}")


def _usable(device: str) -> str | None:
    import torch

    try:
        where = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        return f"cannot be used: {str(error).splitlines()[0]}"
    return "cannot be used: it holds no numbers" if where.type == "meta" else None


def _default_device(_: TrainConfig) -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


AUTO = "auto"
"""Stands for the objective that a comparison chooses."""


def _default_workers(_: TrainConfig) -> int:
    cores = available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)  # those of torchrun share them
    return 0 if cores <= 1 else min(cores, 8)


@dataclass(frozen=True)
class TrainConfig:
    """Arguments of :func:`crowdnal.train.run`; the command line has the same under the same names.

    Where ``None`` is the default, :meth:`resolved` fills it in: some depend on whether the backbone is frozen and
    whether it starts from given weights.
    """

    # fmt: off
    images: Path = option("data", "folder of images, searched in depth", MISSING, metavar="DIR", check=_is_folder)
    annotations: Path = option(
        "data", "labels: one per row (columns task, worker, label), or dense: a row per image, a column per worker",
        MISSING, check=_exists)
    out: Path = option("running", "folder for everything that is written", MISSING, metavar="DIR", free=True)
    model: str = option("model", "timm model, local-dir:PATH or hf-hub:NAME", MISSING, check=_not_empty)
    objective: str = option(
        "objective", f"how annotators are modelled; {AUTO} compares some on the features of the images, and takes one",
        "feature-em")
    compare: Literal["votes", "nothing"] = option(
        "objective", "before training, heads on the features with the objective and with majority votes; a line says "
        "if the votes foresee labels better. nothing leaves it out", "votes", free=True)
    options: tuple[str, ...] = option(
        "objective", "argument of the objective; repeatable", (), metavar="KEY=VALUE", flag="--option")
    format: str = option(
        "data", f"of the annotations: auto, long, dense, or the export of a tool: {', '.join(formats())}", "auto",
        metavar="NAME", unset="auto, by the header", check=_is_format)
    items: Path | None = option(
        "data", "image of each row of a dense file without header (and of --truth with a label per line), one per line",
        check=_is_file)
    task_column: str = option("data", "column of the image", "task")
    worker_column: str = option("data", "column of the annotator", "worker")
    label_column: str = option("data", "column of the label", "label")
    probabilities: tuple[str, ...] | None = option(
        "data", "instead of --label-column a column per class: each class with a probability above 0 is a label that "
        "counts as much; --classes names them otherwise", metavar="A,B,C", check=_names)
    weight_column: str | None = option("data", "column of how much a label counts, such as a confidence")
    last: str | None = option(
        "data", "of several labels of a worker for an image only the last counts: column of the time, or 'row' for the "
        "order of the rows", metavar="COLUMN", unset="all count")
    unsure: tuple[str, ...] | None = option(
        "data", "answers that are no classes, such as 'cannot tell'", metavar="A,B,C")
    columns: tuple[str, ...] | None = option(
        "data", "names of all columns of the annotations, where they have no header", metavar="A,B,C")
    separator: str | None = option(
        "data", "between the cells of the annotations", metavar="TEXT", unset="by the header", check=_not_empty)
    encoding: str | None = option("data", "of the annotations", metavar="NAME", unset="by its mark, else utf-8")
    missing: tuple[str, ...] | None = option(
        "data", "what stands for no label, beside the usual words (NA, null, ...); '' means that only empty cells do",
        metavar="A,B,C", unset="-1 in dense files")
    classes: tuple[str, ...] | None = option(
        "data", "all classes in order, or names for labels 0, 1, 2", metavar="A,B,C", check=_names,
        unset="those found")
    weights: str | None = option(
        "model", "a checkpoint, or the name of an installed package that holds one", metavar="WHAT", check=_not_empty)
    pretrained: bool = option("model", "weights by timm's own download", False)
    image_size: int | None = option(
        "model", "side of the input in pixels", check=_at_most(16384), unset="the model's")
    augment: Literal["standard", "light", "none"] = option(
        "model", "of training images: timm's standard (crops, flips, colours), light (small crops), none", "standard")
    freeze_backbone: bool = option("model", "compute features once and train only the classifier on them", False)
    feature_cache: Path | None = option(
        "model", "where features are kept", metavar="DIR", free=True, unset="OUT/features")
    epochs: int | None = option("training", "passes over the labels", fill=ByMode(40, 20, 60), check=_count)
    batch_size: int | None = option("training", "images per step", fill=ByMode(64, 64, 64), check=_count)
    lr: float | None = option(
        "training", "learning rate of the model", fill=ByMode(1e-3, 1e-4, 1e-3), check=_positive)
    objective_lr: float | None = option(
        "training", "learning rate of the objective", check=_positive, unset="--lr", fill=lambda config: config.lr)
    weight_decay: float | None = option(
        "training", "never on the objective", fill=ByMode(0.0, 0.05, 0.05), check=_not_negative)
    optimizer: str | None = option("training", "timm optimizer", fill=ByMode("adam", "adamw", "adamw"))
    drop_rate: float | None = option(
        "model", "dropout before the classifier", metavar="P", fill=ByMode(0.5, 0.0, 0.0), check=_fraction)
    schedule: Literal["constant", "cosine"] | None = option(
        "training", "of both learning rates", fill=ByMode("constant", "cosine", "cosine"))
    cross_fit: int = option(
        "training", "folds, with a frozen backbone: for each a head is trained on the other images, and says what the "
        "objective is told of these; the model has the mean of the heads", 0, metavar="FOLDS", check=_folds)
    holdout: float = option(
        "objective", "share of the labels kept out of training; the epoch that predicts them best is reported, and its "
        "weights kept in OUT/model_selected", 0.0, metavar="FRACTION", check=_fraction)
    test_images: Path | None = option("test set", "folder of images", metavar="DIR", check=_is_folder)
    test_labels: Path | None = option(
        "test set", "columns task, label, or a label per line with --test-items", check=_is_file)
    test_items: Path | None = option("test set", "image of each line of --test-labels, one per line", check=_is_file)
    truth: Path | None = option(
        "data",
        "true labels of annotated images (columns task, label, or a label per line with --items): only reported",
        check=_is_file)
    gold: Path | None = option(
        "data", "true labels of some images, as --truth: trained on beside the annotators' labels", check=_is_file)
    seed: int = option(
        "training", "of all that is drawn: equal seeds give equal weights on one machine", 0, check=_not_negative)
    workers: int | None = option(
        "running", "processes that read images", check=_not_negative, free=True, unset="one a core, 8 at most",
        fill=_default_workers)
    threads: int | None = option(
        "running", "of each operation on the CPU", check=_at_most(1024), unset="torch's own choice")
    device: str | None = option(
        "running", "cpu, cuda, cuda:1 ...", check=_usable, fill=_default_device, unset="cuda if there is one")
    amp: bool = option("running", "bfloat16 autocast", False)
    log: Literal["csv", "tensorboard"] = option(
        "running", "numbers of each epoch: OUT/history.csv at the end, or also OUT/tensorboard meanwhile", "csv",
        free=True)
    # fmt: on

    @property
    def has_weights(self) -> bool:
        """Whether the backbone starts from given weights."""
        return self.pretrained or self.weights is not None

    def resolved(self) -> TrainConfig:
        """With every default filled in, checked.

        Raises:
            InputError: naming the argument.
        """
        config = self
        for name, known in OPTIONS.items():
            if known.fill is not None and getattr(config, name) is None:
                config = replace(config, **{name: known.fill(config)})
        config._check()
        return config

    def _check(self) -> None:
        for name in OPTIONS:
            check_option(name, getattr(self, name))
        if self.weights is not None and self.pretrained:
            raise InputError("--weights and --pretrained exclude each other: give one of them")
        if self.cross_fit and not self.freeze_backbone:
            raise InputError(
                f"--cross-fit {self.cross_fit} trains as many heads on the features of a frozen backbone: add "
                "--freeze-backbone, or leave it out"
            )
        if (self.test_images is None) != (self.test_labels is None):
            raise InputError("--test-images and --test-labels go together: give both or neither")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {name: _plain(getattr(self, name)) for name in OPTIONS}

    def difference(self, other: dict[str, Any]) -> str | None:
        """The first argument in which another run (its ``to_dict``) would compute something else, in words."""
        for name, value in self.to_dict().items():
            if not OPTIONS[name].free and other.get(name) != value:
                return f"{flag(name)}: it was {in_words(other.get(name))}, now {in_words(value)}"
        return None

    def command(self, *, resume: bool = False) -> str:
        """The shell command that runs this configuration."""
        words = ["crowdnal", "train"]
        for f in fields(self):
            value = getattr(self, f.name)
            if value == f.default and f.name != "objective":
                continue
            if f.name == "options":
                words += [word for option in value for word in (flag(f.name), option)]
            elif value is True:
                words.append(flag(f.name))
            else:
                words += [flag(f.name), in_words(value)]
        return shlex.join([*words, "--resume"] if resume else words)


OPTIONS: dict[str, Option] = {f.name: f.metadata["option"] for f in fields(TrainConfig)}
DEFAULTS = {f.name: f.default for f in fields(TrainConfig)}
VALUE_TYPES = {  # of a field that is not None
    name: typing.get_args(hint)[0] if type(None) in typing.get_args(hint) else hint
    for name, hint in typing.get_type_hints(TrainConfig).items()
}


# Of the annotations, whatever is done with them
READING = (
    "format", "items", "task_column", "worker_column", "label_column", "probabilities", "weight_column", "last",
    "unsure", "columns", "separator", "encoding", "missing", "classes",
)  # fmt: skip


def check_option(name: str, value: Any) -> None:
    """Check the value of one option.

    Raises:
        InputError: naming it.
    """
    known, kind = OPTIONS[name], VALUE_TYPES[name]
    if value is None:
        return
    problem = known.check(value) if known.check else None
    if typing.get_origin(kind) is Literal and value not in typing.get_args(kind):
        problem = f"is unknown: use one of {', '.join(typing.get_args(kind))}"
    if problem is not None:
        shown = repr(value) if isinstance(value, (str, float)) else in_words(value)
        raise InputError(f"{flag(name)} {shown} {problem}")


def flag(name: str) -> str:
    """The command-line spelling of a field."""
    return OPTIONS[name].flag or "--" + name.replace("_", "-")


def default_in_words(name: str) -> str:
    """The default of a field as the help shows it; empty where there is none."""
    known, default = OPTIONS[name], DEFAULTS[name]
    if known.unset is not None or known.fill is not None:
        return known.unset or str(known.fill)
    return "" if default is MISSING or in_words(default) == NOT_GIVEN else in_words(default)


def options_table() -> str:
    """The options of ``crowdnal train`` as Markdown, a table for each group."""
    parts = []
    for group, note in GROUPS.items():
        parts += [f"**{group}**{': ' if note else ''}{note}", "", "| option | default | |", "| --- | --- | --- |"]
        for name, known in OPTIONS.items():
            if known.group == group:
                default = "required" if DEFAULTS[name] is MISSING else default_in_words(name)
                parts.append(f"| `{flag(name)}` | {default} | {known.help} |")
        parts.append("")
    return "\n".join(parts)


def in_words(value: Any) -> str:
    """A value of a field as a person would write it."""
    if value is None or value is False or value in ((), []):
        return NOT_GIVEN
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    if isinstance(value, (tuple, list)):
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow(value)  # quotes what has a comma
        return text.getvalue()
    return str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    return list(value) if isinstance(value, tuple) else value
