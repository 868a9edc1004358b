"""The data of a run: images found and matched to the tasks of the files, annotations and truths as tensors."""

from __future__ import annotations

import hashlib
import random
import re
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from crowdnal._utils.extras import require
from crowdnal.data import USUAL, Annotations, Long, Reading, read_answers, read_labels, read_lines
from crowdnal.train.config import InputError, TrainConfig
from crowdnal.train.images import find_images, match, read_image
from crowdnal.train.progress import Reporter

_LARGE = 1 << 26  # bytes, which take more than a moment to read


@dataclass(frozen=True)
class Images:
    """Image files with the id each goes by in reports (the task id where there is one), and the true class or -1."""

    files: tuple[Path, ...]
    ids: tuple[str, ...]
    truth: Tensor

    def __len__(self) -> int:
        return len(self.files)


@dataclass(frozen=True)
class TrainingData:
    """All images of ``--images`` with their annotations (none for some), and the labelled test images.

    ``classes`` are what the model tells apart; behind them among ``labels`` are answers that are no class.
    ``gold [N]`` are known classes to train on, -1 where unknown.
    """

    images: Images
    annotations: Annotations
    test: Images
    classes: tuple[str, ...]
    fingerprint: str
    gold: Tensor

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of all labels."""
        assert self.annotations.vocabulary is not None
        return tuple(map(str, self.annotations.vocabulary.classes))


def load(config: TrainConfig, reporter: Reporter | None = None) -> TrainingData:
    """Read and match everything a configuration names.

    Args:
        config: of the run.
        reporter: shows how far the reading is.

    Raises:
        InputError: naming the file, the line and the fix.
    """
    names = find_images(config.images, "--images")
    with as_options():
        lines = None if config.items is None else read_lines(config.items)
        how, want = how_to_read(config)
        with reading_progress(reporter, config.annotations) as progress:
            answers = read_answers(config.annotations, how._replace(progress=progress), want, lines)
    if not len(answers.label.codes):
        raise InputError(f"{config.annotations} has no labels at all: check --format and --missing")

    def where(task: int) -> str:
        given = np.flatnonzero(answers.task.codes == task)
        return answers.place("task", int(given[0])) if len(given) else str(config.annotations)

    tasks = [str(task) for task in answers.task.values]
    row = match(tasks, names, config.images, where)
    ids = list(names)
    for task, i in row.items():
        ids[i] = task
    with as_options():
        annotations = Annotations.trusted(answers.fields(ids, None, config.classes))
    vocabulary = annotations.vocabulary
    assert vocabulary is not None
    unsure = () if config.unsure is None else config.unsure
    classes = tuple(str(name) for name in vocabulary.classes if name not in unsure)
    if len(classes) < 2:
        raise InputError(f"{config.annotations}: all labels are {classes[0]!r}; give all classes with --classes")

    def of_images(path: Path | None) -> Tensor:
        found = torch.full((len(names),), -1)
        if path is not None:
            with as_options():
                labels = read_labels(path, items=lines, task=config.task_column, label=config.label_column)
                codes = labels.codes(vocabulary.classes[: len(classes)])
            known = list(map(str, labels.items))
            at = match(known, names, config.images, labels.place)
            found[[at[task] for task in known]] = codes
        return found

    gold = of_images(config.gold)
    images = Images(tuple(config.images / name for name in names), tuple(ids), of_images(config.truth))
    test = _test_images(config, vocabulary.classes[: len(classes)])
    return TrainingData(images, annotations, test, classes, _fingerprint(annotations, images, test, gold), gold)


def how_to_read(config: Any) -> tuple[Reading, Long]:
    """How the annotations are written, and what their columns mean; of a configuration's options of that name."""
    how = Reading(None if config.format == "auto" else config.format, config.columns, config.separator, config.encoding)
    return how, Long(
        config.task_column,
        config.worker_column,
        config.label_column,
        config.weight_column,
        config.probabilities,
        last=True if config.last == "row" else config.last or False,
        unsure=config.unsure or (),
        missing=USUAL if config.missing is None else tuple(filter(None, config.missing)),
        classes=config.classes,
    )


def _test_images(config: TrainConfig, classes: Sequence[Hashable]) -> Images:
    if config.test_images is None or config.test_labels is None:
        return Images((), (), torch.empty(0, dtype=torch.int64))
    names = find_images(config.test_images, "--test-images")
    with as_options(items="--test-items"):
        lines = None if config.test_items is None else read_lines(config.test_items)
        labels = read_labels(config.test_labels, items=lines, task=config.task_column, label=config.label_column)
        codes = labels.codes(classes)
    tasks = list(map(str, labels.items))
    row = match(tasks, names, config.test_images, labels.place)
    return Images(tuple(config.test_images / names[row[task]] for task in tasks), tuple(tasks), codes)


@contextmanager
def as_options(**other: str) -> Iterator[None]:
    """A reader's errors and warnings in the words of the command: ``task=`` is --task-column."""
    flags = {name: f"--{name}-column" for name in ("task", "worker", "label", "weight")}
    words = ("classes", "columns", "encoding", "format", "items", "last", "missing", "probabilities", "separator")
    flags |= {name: f"--{name}" for name in (*words, "unsure")} | other
    argument = rf"\b({'|'.join(flags)})=(?=(['\"\w])?)"  # with its value behind it, or without

    def said(text: str) -> str:
        text = re.sub(r"\bis not in classes\b", "is not in classes=", text).replace("missing=()", "missing=''")
        return re.sub(argument, lambda match: flags[match[1]] + " " * bool(match[2]), text)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except ValueError as error:
            raise InputError(said(str(error))) from None
    for warning in caught:
        warnings.warn_explicit(said(str(warning.message)), warning.category, warning.filename, warning.lineno)


@contextmanager
def reading_progress(reporter: Reporter | None, path: Path) -> Iterator[Callable[[int], None] | None]:
    """A bar for the reading of a large file, on a terminal; what is yielded is told the characters read so far."""
    size = path.stat().st_size if path.is_file() else 0
    if reporter is None or not reporter.console.is_terminal or size < _LARGE:
        yield None
        return
    with reporter.track(f"reading {path.name}", size) as track:
        yield lambda done: track.advance(done - track.done)


def _fingerprint(annotations: Annotations, images: Images, test: Images, gold: Tensor) -> str:
    """Digest of what is learnt from: a resumed run must find the same."""
    digest = hashlib.sha256()
    weights = [] if annotations.weight is None else [annotations.weight]
    for tensor in (annotations.indptr, annotations.annotator, annotations.label, images.truth, test.truth, *weights):
        digest.update(tensor.contiguous().numpy().tobytes())
    if bool((gold >= 0).any()):
        digest.update(gold.numpy().tobytes())
    vocabulary = annotations.vocabulary
    assert vocabulary is not None
    digest.update(repr((vocabulary.items, vocabulary.annotators, vocabulary.classes, test.ids)).encode())
    return digest.hexdigest()


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """``(image [channels, H, W], row)``; what is drawn for an image depends on (seed, epoch, row) and nothing else.

    So neither the number of workers nor a resumed run changes an augmentation.
    """

    def __init__(
        self, files: Sequence[Path], transform: Callable[[Any], Tensor], mode: str, seed: int | None = None
    ) -> None:
        self.files = files
        self.transform = transform
        self.mode = mode
        self.seed = seed

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        image = read_image(self.files[row], self.mode)
        if self.seed is None:
            return self.transform(image), row
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        seed_everything(derive_seed(self.seed, row), devices=False)
        try:
            return self.transform(image), row
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])


def derive_seed(*parts: int | str) -> int:
    """A seed that depends on all parts and is unlike that of any other parts."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_everything(seed: int, *, devices: bool = True) -> None:
    """Seed Python, NumPy and torch; without ``devices`` torch's CPU generator only (in a worker, say)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if devices:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def transforms(
    model: Any, image_size: int | None, augment: str
) -> tuple[Callable[[Any], Tensor], Callable[[Any], Tensor], dict[str, Any], str]:
    """Evaluation transform, training transform, timm's data configuration of the model, and the mode of images."""
    timm_data = require("timm.data", extra="train")
    config = timm_data.resolve_data_config({} if image_size is None else {"img_size": image_size}, model=model)
    channels = config["input_size"][0]
    if channels not in (1, 3):
        raise InputError(f"--model takes images of {channels} channels; 1 or 3 can be read from files")
    evaluate = timm_data.create_transform(**config, is_training=False)
    shared = {key: config[key] for key in ("input_size", "interpolation", "mean", "std")}
    if augment == "none":
        train = evaluate
    elif augment == "light":
        train = timm_data.create_transform(
            **shared, is_training=True, scale=(0.7, 1.0), ratio=(0.9, 1.1), hflip=0.0, color_jitter=None
        )
    else:
        train = timm_data.create_transform(**shared, is_training=True)
    return evaluate, train, config, {1: "L", 3: "RGB"}[channels]
