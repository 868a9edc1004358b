"""One training run from files to files."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import crowdnal
from crowdnal import objectives
from crowdnal._utils.extras import require
from crowdnal.data import Annotations
from crowdnal.train import data as data_module
from crowdnal.train import features as features_module
from crowdnal.train import outputs
from crowdnal.train.config import InputError, TrainConfig, in_words
from crowdnal.train.data import ImageDataset, TrainingData, derive_seed, seed_everything
from crowdnal.train.files import (
    FEATURES,
    content_digest,
    load_state,
    locked,
    reading,
    remove_leftovers,
    write_json,
    writing,
)  # fmt: skip
from crowdnal.train.loop import (
    CHECKPOINT,
    SELECTED,
    FeatureInputs,
    ImageInputs,
    Inputs,
    Progress,
    Trainer,
    check_optimizer,
)
from crowdnal.train.options import objective_class, parse_options, resolved_options, value_words
from crowdnal.train.progress import Reporter, Stopwatch
from crowdnal.train.report import render, summary
from crowdnal.train.weights import create_model, weights_digest
from crowdnal.training import CrowdModel, attach, is_timm

RUN = "run.json"


class Interrupted(Exception):  # noqa: N818  (it is no error)
    """The user stopped a run; the message has the command that goes on with it."""


@dataclass(frozen=True)
class Result:
    """What a run found: the content of ``metrics.json``, the estimates behind the tables, and the folder."""

    out: Path
    metrics: dict[str, Any]
    estimates: outputs.Estimates
    data: TrainingData
    model: nn.Module
    objective: objectives.Objective


def run(config: TrainConfig, *, resume: bool = False, reporter: Reporter | None = None) -> Result:
    """Train, and write model, tables and report to ``config.out``.

    Args:
        config: the arguments; defaults are filled in.
        resume: go on with the run in ``config.out``, which must have the same arguments.
        reporter: where progress goes; default standard output.

    Raises:
        InputError: something given is wrong. An ``out`` that holds a run already is left as it is.
        Interrupted: by Ctrl-C, after which ``resume`` goes on.
    """
    session = _session(config, resume, reporter or Reporter())
    given, config, out = config, session.config, session.config.out
    session.describe()
    with locked(out):
        if resume:
            remove_leftovers(out)
        else:
            _open(config, resume)  # again: another run may have begun meanwhile
            write_json(out / RUN, session.record)
        threads = torch.get_num_threads()
        torch.set_num_threads(config.threads or threads)
        try:
            trainer = session.trainer(session.prepare())
            if resume:
                with reading(out / CHECKPOINT, "delete it, and --resume begins with the first epoch"):
                    trainer.resume()
            board = out / "tensorboard" if config.log == "tensorboard" else None
            with session.watch("training"), session.reporter.logging(board, trainer.progress.epoch):
                progress = _input_errors(trainer.fit)
            with session.watch("report"):
                return session.finish(trainer, progress)
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; go on with: {given.command(resume=True)}") from None
        except InputError:
            if not (out / CHECKPOINT).exists():  # nothing to resume: let the fixed command begin again
                (out / RUN).unlink(missing_ok=True)
            raise
        finally:
            torch.set_num_threads(threads)


def plan(config: TrainConfig, *, resume: bool = False, reporter: Reporter | None = None) -> None:
    """Read and check everything that :func:`run` would, and say what it would do; nothing is written.

    Raises:
        InputError: something given is wrong.
    """
    session = _session(config, resume, reporter or Reporter())
    session.describe()
    what = "go on with the run in" if resume else "write to"
    session.reporter.say(f"would {what} {config.out}; nothing was written")


def _session(given: TrainConfig, resume: bool, reporter: Reporter) -> _Session:
    """Everything read, made and checked, up to what takes long or writes."""
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise InputError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: crowdnal train is one process; start it without torchrun, or use "
            "DistributedDataParallel in a loop of your own (docs/loops.md)"
        )
    config = given.resolved()
    kind = objective_class(config.objective)
    options = parse_options(kind, config.options)
    recorded = _open(config, resume)
    if config.log == "tensorboard":
        require("tensorboard", extra="tensorboard")
    data = _input_errors(data_module.load, config, reporter)
    seed_everything(derive_seed(config.seed, "objective"))
    if len(data.labels) > len(data.classes):
        options["num_labels"] = len(data.labels)
    objective = _input_errors(kind, len(data.classes), data.annotations.num_annotators, **options)
    if config.gold is not None:
        objective.set_gold(data.gold, data.annotations)
    seed_everything(derive_seed(config.seed, "model"))
    model, origin = create_model(config, len(data.classes))
    check_optimizer(str(config.optimizer))
    record = {
        "crowdnal": crowdnal.__version__,
        "arguments": config.to_dict(),
        "data": data.fingerprint,
        "images": content_digest((*data.images.files, *data.test.files)),
        "weights": weights_digest(model),
    }
    files = {"data": "files of annotations, labels or images", "images": "images", "weights": "weights of the model"}
    for name, what in files.items():
        if recorded is not None and recorded[name] != record[name]:
            raise InputError(f"--resume: the {what} changed since {config.out} was begun")
    return _Session(config, given, data, objective, options, model, origin, record, reporter, Stopwatch())


@dataclass
class _Session:
    """The parts of one run, handed from step to step."""

    config: TrainConfig
    given: TrainConfig
    data: TrainingData
    objective: objectives.Objective
    options: dict[str, Any]
    model: Any
    origin: str
    record: dict[str, Any]
    reporter: Reporter
    watch: Stopwatch

    def __post_init__(self) -> None:
        config, a = self.config, self.data.annotations
        self.transforms = data_module.transforms(self.model, config.image_size, config.augment)
        self.input_size: tuple[int, ...] = tuple(self.transforms[2]["input_size"])
        self.parts = split(a, config.holdout, config.seed)
        self.head = None
        self.item_features: Tensor | None = None  # of given weights, as they were before training
        if config.freeze_backbone:
            drop_rate = float(config.drop_rate or 0)
            self.head = features_module.frozen_head(self.model, drop_rate, config.model, self.input_size)

    def describe(self) -> None:
        a, config = self.data.annotations, self.config
        annotated = int((a.counts > 0).sum())
        self.reporter.say(
            f"{a.num_annotations} labels by {a.num_annotators} annotators on {annotated} of {a.num_items} images, "
            f"{len(self.data.classes)} classes"
        )
        parts = sum(p.numel() for p in self.model.parameters()) / 1e6
        frozen = ", backbone frozen" if config.freeze_backbone else ""
        self.reporter.say(f"{config.model} ({parts:.1f} M parameters{frozen}), {self.origin}, on {config.device}")
        if self.origin == "random weights" and config.freeze_backbone:
            self.reporter.say("note: frozen random weights make poor features; give --weights or --pretrained")
        overlap = set(self.data.test.files) & {
            file for file, count in zip(self.data.images.files, a.counts.tolist(), strict=True) if count
        }
        if overlap:
            self.reporter.say(f"note: {len(overlap)} test images are also trained on, {min(overlap).name} for one")
        options = resolved_options(type(self.objective), self.options).items()
        self.reporter.say(
            " ".join([f"{config.objective}:", *(f"{key}={value_words(value)}" for key, value in options)])
        )
        names = ("epochs", "batch_size", "optimizer", "lr", "objective_lr", "weight_decay", "drop_rate", "schedule")
        told = (f"{name.replace('_', ' ')} {in_words(getattr(config, name))}" for name in (*names, "holdout", "seed"))
        self.reporter.say(", ".join(told))

    def prepare(self) -> tuple[nn.Module, Inputs]:
        """What is trained, and where its input comes from."""
        config, model = self.config, self.model
        evaluate, train, _, mode = self.transforms
        sets = {"images": self.data.images.files, "test": self.data.test.files}
        if self.head is None:
            if config.has_weights and is_timm(model):
                with self.watch("features"):
                    self.item_features = self._features("images", sets["images"], evaluate, mode)
            datasets = {name: ImageDataset(files, evaluate, mode) for name, files in sets.items()}
            images = ImageInputs(ImageDataset(sets["images"], train, mode), datasets, config)
            model.to(device=config.device, memory_format=torch.channels_last)
            return model, images
        with self.watch("features"):
            features = {name: self._features(name, files, evaluate, mode) for name, files in sets.items() if len(files)}
        self.item_features = features["images"]
        self.objective.set_feature_dim(features["images"].shape[1])
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for parameter in self.head.parameters():
            parameter.requires_grad_(True)
        return self.head.to(str(config.device)), FeatureInputs(features, str(config.device))

    def _features(self, name: str, files: tuple[Path, ...], transform: Any, mode: str) -> Tensor:
        config = self.config
        folder = config.feature_cache or config.out / FEATURES
        device = str(config.device)
        key = features_module.cache_key(files, config.model, self.record["weights"], transform, device, config.amp)
        what = "features" if name == "images" else "test features"
        features, cached = features_module.cached_features(
            files, folder, key, lambda: self._extract(what, files, transform, mode)
        )
        if cached:
            self.reporter.say(f"{what} of {len(files)} images from {folder}")
        return features

    def _extract(self, what: str, files: tuple[Path, ...], transform: Any, mode: str) -> Tensor:
        with self.reporter.track(what, len(files)) as track:
            return features_module.extract(
                self.model, files, transform, mode, device=str(self.config.device), workers=self.config.workers or 0,
                amp=self.config.amp, advance=track.advance,
            )  # fmt: skip

    def trainer(self, prepared: tuple[nn.Module, Inputs]) -> Trainer:
        module, inputs = prepared
        identity = nn.Identity() if self.config.freeze_backbone else None
        model = attach(module, self.objective, features=identity).to(str(self.config.device))
        config = self.config
        trainer = Trainer(model, inputs, *self.parts, self.data.test.truth, config, config.out, self.reporter)
        gold = self.data.gold >= 0
        if bool(gold.any()):
            trainer.rows = ((trainer.annotations.counts > 0) | gold).nonzero()[:, 0]
        return trainer

    def finish(self, trainer: Trainer, progress: Progress) -> Result:
        """Predict everything once more and write it all down."""
        config, out = self.config, self.config.out
        logits, _ = trainer.predict("images", torch.arange(len(self.data.images)))
        test_logits, _ = trainer.predict("test", torch.arange(len(self.data.test)))
        if self.item_features is None and is_timm(self.model):  # random ones before training say nothing
            self.item_features = self._extract("features", self.data.images.files, *self.transforms[::3])
        estimates = outputs.estimate(
            self.objective, logits, self.data.annotations, self.item_features, self.data.gold, test_logits
        )
        outputs.write_tables(out, self.data, estimates, progress.history)
        selected_accuracy = None
        if progress.selected_epoch is not None:
            selected_accuracy = progress.history[progress.selected_epoch - 1]["test_accuracy"]
            self._save_selected(trainer.model)
        self._save(out)
        if self.objective.predicts:
            self.reporter.say(
                f"note: model.safetensors is the classifier alone; {config.objective} predicts with "
                "objective.safetensors on its features"
            )
        a = self.data.annotations
        found: dict[str, Any] = {
            "crowdnal": crowdnal.__version__,
            "command": self.given.command(),
            "model": config.model,
            "weights": self.origin,
            "objective": repr(self.objective),
            "arguments": config.to_dict(),
            "device": _device_name(str(config.device)),
            "backend": crowdnal.backend(),
            "num_images": a.num_items,
            "num_annotated": int((a.counts > 0).sum()),
            "num_annotators": a.num_annotators,
            "num_annotations": a.num_annotations,
            "num_heldout": 0 if trainer.heldout is None else trainer.heldout.num_annotations,
            "num_test": len(self.data.test),
            "classes": list(self.data.classes),
            "epochs": progress.epoch,
            "train_loss": progress.history[-1]["train_loss"],
            "selected_epoch": progress.selected_epoch,
            "selected_heldout_log_likelihood": progress.selected_value,
            "selected_test_accuracy": selected_accuracy,
            **outputs.measure(self.data, estimates),
            "seconds": {phase: round(seconds, 2) for phase, seconds in self.watch.seconds.items()},
        }
        write_json(out / "metrics.json", found)
        outputs.write_report(out, render(found, self.data, estimates, progress.history))
        self.model.eval()
        result = Result(out, found, estimates, self.data, self.model, self.objective)
        for line in summary(found, out):
            self.reporter.say(line)
        return result

    def _save_selected(self, model: CrowdModel) -> None:
        last = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with reading(
            self.config.out / SELECTED, f"delete it and {CHECKPOINT}, and --resume begins with the first epoch"
        ):
            model.load_state_dict(load_state(self.config.out / SELECTED)["model"])
        self._save(self.config.out / "model_selected")
        model.load_state_dict(last)

    def _save(self, folder: Path) -> None:
        with writing(folder / outputs.MODEL_FILES[0]):
            outputs.save_model(folder, self.model, self.objective, self.data.classes, self.input_size)


def split(annotations: Annotations, holdout: float, seed: int) -> tuple[Annotations, Annotations | None]:
    """Annotations to train on, and the share kept out of training (None for 0); all items stay in both."""
    if holdout == 0:
        return annotations, None
    count = round(holdout * annotations.num_annotations)
    if not 0 < count < annotations.num_annotations:
        raise InputError(f"--holdout {holdout} of {annotations.num_annotations} labels leaves one side empty")
    generator = torch.Generator().manual_seed(derive_seed(seed, "holdout"))
    kept = torch.ones(annotations.num_annotations, dtype=torch.bool)
    kept[torch.randperm(annotations.num_annotations, generator=generator)[:count]] = False
    return annotations.select(kept), annotations.select(~kept)


def _input_errors(function: Any, *arguments: Any, **options: Any) -> Any:
    """Call with what the user gave: a ValueError is about that."""
    try:
        return function(*arguments, **options)
    except ValueError as error:
        raise InputError(str(error)) from error


def _open(config: TrainConfig, resume: bool) -> Mapping[str, Any] | None:
    """The record of the run in ``out`` if it is to be resumed; refuses to touch what is there otherwise."""
    out, path = config.out, config.out / RUN
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file: give a folder")
    if resume:
        if not path.is_file():
            raise InputError(f"--resume: {out} holds no run; leave --resume out to begin one")
        with reading(path, "begin again in another folder"):
            read = json.loads(path.read_text(encoding="utf-8"))
            recorded = {name: read[name] for name in ("data", "images", "weights")} | {
                "arguments": {**read["arguments"]}
            }
        difference = config.difference(recorded["arguments"])
        if difference is not None:
            raise InputError(f"--resume: {out} was begun with other arguments. {difference}")
        return recorded
    if path.exists():
        raise InputError(f"--out {out} holds a run already: add --resume to go on with it, or give another folder")
    taken = [name for name in (*outputs.MODEL_FILES, *outputs.TABLE_FILES, CHECKPOINT) if (out / name).exists()]
    if taken:
        raise InputError(f"--out {out} has a {taken[0]} that would be overwritten: give another folder")
    return None


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device} ({platform.processor() or platform.machine()})"
