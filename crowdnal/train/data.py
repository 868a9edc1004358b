"""The data of a run: images found and matched to the tasks of the files, annotations and truths as tensors."""

from __future__ import annotations

import difflib
import hashlib
import random
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from crowdnal._utils.extras import require
from crowdnal.data import USUAL, Annotations, Long, Reading, read_answers, read_labels, read_lines
from crowdnal.train.config import InputError, TrainConfig

EXTENSIONS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})


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

    ``gold [N]`` are known classes to train on, -1 where unknown.
    """

    images: Images
    annotations: Annotations
    test: Images
    classes: tuple[str, ...]
    fingerprint: str
    gold: Tensor


def load(config: TrainConfig) -> TrainingData:
    """Read and match everything a configuration names.

    Raises:
        InputError: naming the file, the line and the fix.
    """
    names = find_images(config.images, "--images")
    want = Long(
        config.task_column,
        config.worker_column,
        config.label_column,
        missing=USUAL if config.missing is None else tuple(filter(None, config.missing)),
        classes=config.classes,
    )
    with as_options():
        lines = None if config.items is None else read_lines(config.items)
        how = Reading(None if config.format == "auto" else config.format, config.columns, encoding=config.encoding)
        answers = read_answers(config.annotations, how, want, lines)
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
    assert annotations.vocabulary is not None
    classes = tuple(map(str, annotations.vocabulary.classes))
    if len(classes) < 2:
        raise InputError(f"{config.annotations}: all labels are {classes[0]!r}; give all classes with --classes")

    def of_images(path: Path | None) -> Tensor:
        found = torch.full((len(names),), -1)
        if path is not None:
            with as_options():
                labels = read_labels(path, items=lines, task=config.task_column, label=config.label_column)
                codes = labels.codes(annotations.vocabulary.classes)  # type: ignore[union-attr]
            known = list(map(str, labels.items))
            at = match(known, names, config.images, labels.place)
            found[[at[task] for task in known]] = codes
        return found

    gold = of_images(config.gold)
    images = Images(tuple(config.images / name for name in names), tuple(ids), of_images(config.truth))
    test = _test_images(config, annotations.vocabulary.classes)
    return TrainingData(images, annotations, test, classes, _fingerprint(annotations, images, test, gold), gold)


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
    """A reader's errors in the words of the command: ``task=`` is --task-column."""
    flags = {name: f"--{name}-column" for name in ("task", "worker", "label")}
    flags |= {name: f"--{name}" for name in ("classes", "columns", "encoding", "format", "items", "missing")} | other
    try:
        yield
    except ValueError as error:
        text = re.sub(r"\bis not in classes\b", "is not in classes=", str(error))
        argument = rf"\b({'|'.join(flags)})=(?=(['\"\w])?)"  # with its value behind it, or without
        raise InputError(re.sub(argument, lambda match: flags[match[1]] + " " * bool(match[2]), text)) from None


def find_images(root: Path, argument: str) -> list[str]:
    """Paths of the images under a folder, relative to it, sorted, with forward slashes."""
    found = []
    for path in root.rglob("*"):
        relative = path.relative_to(root)
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.suffix.lower() in EXTENSIONS and not hidden and path.is_file():
            found.append(relative.as_posix())
    if not found:
        raise InputError(f"{argument} {root} holds no images ({', '.join(sorted(EXTENSIONS))})")
    return sorted(found)


def match(tasks: Sequence[str], names: Sequence[str], root: Path, where: Callable[[int], str]) -> dict[str, int]:
    """Row in ``names`` of each distinct task.

    A task is a path relative to the folder, with or without extension, or only the file's name (again with or
    without extension) where one file has it.

    Raises:
        InputError: no such file (with near matches), several, or two tasks that are one file.
    """
    lookups = [
        _index(names, lambda name: name),
        _index(names, lambda name: str(PurePosixPath(name).with_suffix(""))),
        _index(names, lambda name: PurePosixPath(name).name),
        _index(names, lambda name: PurePosixPath(name).stem),
    ]
    found: dict[str, int] = {}
    owner: dict[int, str] = {}
    for row, task in enumerate(tasks):
        if task in found:
            continue
        wanted = str(PurePosixPath(task.replace("\\", "/")))
        hits = next((lookup[wanted] for lookup in lookups if wanted in lookup), [])
        if not hits:
            near = difflib.get_close_matches(wanted, [*names, *lookups[1], *lookups[3]], n=3)
            hint = f"near matches: {', '.join(dict.fromkeys(near))}" if near else f"it has {names[0]}, for instance"
            raise InputError(f"{where(row)}: no image {task!r} in {root}; {hint}")
        if len(hits) > 1:
            several = ", ".join(names[i] for i in hits[:3])
            raise InputError(f"{where(row)}: {task!r} could be {several}: give the path relative to {root}")
        if hits[0] in owner:
            raise InputError(f"{where(row)}: tasks {owner[hits[0]]!r} and {task!r} are both {names[hits[0]]}")
        found[task] = hits[0]
        owner[hits[0]] = task
    return found


def _index(names: Sequence[str], key: Callable[[str], str]) -> dict[str, list[int]]:
    index: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        index.setdefault(key(name), []).append(i)
    return index


def _fingerprint(annotations: Annotations, images: Images, test: Images, gold: Tensor) -> str:
    """Digest of what is learnt from: a resumed run must find the same."""
    digest = hashlib.sha256()
    for tensor in (annotations.indptr, annotations.annotator, annotations.label, images.truth, test.truth):
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
        image_module = require("PIL.Image", extra="train")
        path = self.files[row]
        try:
            with image_module.open(path) as opened:
                image = opened.convert(self.mode)
        except (OSError, SyntaxError, ValueError) as error:
            raise InputError(f"{path} cannot be read as an image ({error}): mend or remove it") from None
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
