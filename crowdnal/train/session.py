"""The parts of one run, made and checked, and handed from step to step."""

from __future__ import annotations

import copy
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import crowdnal
from crowdnal import objectives
from crowdnal._utils.extras import require
from crowdnal.ccc import CCC
from crowdnal.data import Annotations
from crowdnal.train import data as data_module
from crowdnal.train import features as features_module
from crowdnal.train import outputs
from crowdnal.train.config import AUTO, InputError, TrainConfig, in_words
from crowdnal.train.data import ImageDataset, TrainingData, derive_seed, seed_everything
from crowdnal.train.files import FEATURES, content_digest, load_state, reading, write_json, writing
from crowdnal.train.inputs import FeatureInputs, ImageInputs, Inputs
from crowdnal.train.loop import CHECKPOINT, SELECTED, Progress, Trainer
from crowdnal.train.options import Method, objective_class, parse_options, resolved_options, value_words
from crowdnal.train.processes import Processes
from crowdnal.train.progress import Reporter, Stopwatch
from crowdnal.train.record import check_out
from crowdnal.train.report import render, summary
from crowdnal.train.steps import OneNetwork, Steps, TwoNetworks, check_optimizer
from crowdnal.train.weights import another_model, create_model, weights_digest
from crowdnal.training import VOTES, CrossFit, CrowdModel, attach, is_timm

OTHER = "second"  # folder of the second model, where there are two


@dataclass(frozen=True)
class Result:
    """What a run found: the content of ``metrics.json``, the estimates behind the tables, and the folder."""

    out: Path
    metrics: dict[str, Any]
    estimates: outputs.Estimates
    data: TrainingData
    model: nn.Module
    objective: objectives.Objective


def open_session(given: TrainConfig, resume: bool, reporter: Reporter, processes: Processes) -> Session:
    """Everything read, made and checked, up to what takes long or writes."""
    config = given.resolved()
    recorded = processes.from_first(check_out, config, resume)
    comparison = None if recorded is None else recorded["comparison"]
    arguments = config.to_dict()
    if config.objective == AUTO:
        if config.options:
            raise InputError(f"--option {config.options[0]} is of one objective: leave it out with --objective {AUTO}")
        config = config if comparison is None else replace(config, objective=comparison["method"])
    kind = objective_class(VOTES if config.objective == AUTO else config.objective)
    options = parse_options(kind, config.options)
    if config.log == "tensorboard":
        require("tensorboard", extra="tensorboard")
    data = input_errors(data_module.load, config, reporter)
    networks, origin = input_errors(_networks, config, kind, options, data)
    check_optimizer(str(config.optimizer))
    if config.cross_fit and (issubclass(kind, CCC) or networks[0].objective.predicts):
        raise InputError(f"--cross-fit is of one classifier, but {config.objective} trains several: leave it out")
    if config.cross_fit and processes.size > 1:
        raise InputError("--cross-fit trains heads, which are small, in one process: start it without torchrun")
    record = {
        "crowdnal": crowdnal.__version__,
        "arguments": arguments,
        "data": data.fingerprint,
        "images": content_digest((*data.images.files, *data.test.files)),
        "weights": weights_digest(networks[0].model),
    }
    if comparison is not None:
        record["comparison"] = comparison
    files = {"data": "files of annotations, labels or images", "images": "images", "weights": "weights of the model"}
    for name, what in files.items():
        if recorded is not None and recorded[name] != record[name]:
            raise InputError(f"--resume: the {what} changed since {config.out} was begun")
    return Session(config, given, data, kind, options, networks, origin, record, reporter, Stopwatch(), processes)


class Network(NamedTuple):
    """A timm model, and the objective that learns with it."""

    model: Any
    objective: objectives.Objective


def _networks(
    config: TrainConfig, kind: type[Method], options: Mapping[str, Any], data: TrainingData
) -> tuple[list[Network], str]:
    """One, or the two of CCC; and where the weights come from."""
    sizes: dict[str, Any] = {"num_classes": len(data.classes), "num_annotators": data.annotations.num_annotators}
    if len(data.labels) > len(data.classes):
        sizes["num_labels"] = len(data.labels)
    seed_everything(derive_seed(config.seed, "objective"))
    if issubclass(kind, CCC):
        if config.gold is not None:
            raise InputError(f"--gold: {config.objective} knows no true labels; leave it out, or use another objective")
        layers = [objectives.CrowdLayer(**sizes, confusion_prior=None) for _ in range(2)]
        model, origin = create_model(config, len(data.classes))
        models = model, another_model(model, config, len(data.classes))
        return [Network(*pair) for pair in zip(models, layers, strict=True)], origin
    objective = kind(**sizes, **options)
    if config.gold is not None:
        objective.set_gold(data.gold, data.annotations)
    model, origin = create_model(config, len(data.classes))
    return [Network(model, objective)], origin


@dataclass
class Session:
    """The parts of one run, handed from step to step."""

    config: TrainConfig
    given: TrainConfig
    data: TrainingData
    kind: type[Method]
    options: dict[str, Any]
    networks: list[Network]
    origin: str
    record: dict[str, Any]
    reporter: Reporter
    watch: Stopwatch
    processes: Processes

    def __post_init__(self) -> None:
        config, a = self.config, self.data.annotations
        self.model = self.networks[0].model
        self.transforms = data_module.transforms(self.model, config.image_size, config.augment)
        self.input_size: tuple[int, ...] = tuple(self.transforms[2]["input_size"])
        self.parts = split(a, config.holdout, config.seed)
        self.item_features: Tensor | None = None  # of given weights, as they were before training
        self.trained: list[nn.Module] = [network.model for network in self.networks]
        self.heads: list[features_module.FrozenHead] = []
        if config.freeze_backbone:
            drop_rate = float(config.drop_rate or 0)
            self.heads = [
                features_module.frozen_head(network.model, drop_rate, config.model, self.input_size)
                for network in self.networks
            ]
            self.trained = [*self.heads]
        if config.cross_fit:
            folds = derive_seed(config.seed, "folds")
            head = self.heads[0]
            self.trained = [features_module.head_per_fold(head, self.parts[0], config.cross_fit, folds, config.model)]
        self.ccc: CCC | None = None
        if issubclass(self.kind, CCC):
            pairs = zip(self.trained, self.networks, strict=True)
            models = [attach(module, network.objective) for module, network in pairs]
            self.ccc = input_errors(self.kind, *models, **self.options)

    def describe(self) -> None:
        """Say what is trained on what."""
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
        options = resolved_options(self.kind, self.options).items()
        if config.objective != AUTO:
            self.reporter.say(
                " ".join([f"{config.objective}:", *(f"{key}={value_words(value)}" for key, value in options)])
            )
        if config.cross_fit:
            self.reporter.say(f"cross-fitting: {config.cross_fit} heads, each trained on the images outside its fold")
        names = ("epochs", "batch_size", "optimizer", "lr", "objective_lr", "weight_decay", "drop_rate", "schedule")
        told = (f"{name.replace('_', ' ')} {in_words(getattr(config, name))}" for name in (*names, "holdout", "seed"))
        self.reporter.say(", ".join(told))
        if self.ccc is not None and not self.ccc.warmup_epochs < (config.epochs or 0):
            self.reporter.say(
                f"note: all {config.epochs} epochs are warm-up, so that nothing is corrected: lower --option "
                f"warmup_epochs={self.ccc.warmup_epochs}, or raise --epochs"
            )

    def with_objective(self, name: str) -> Session:
        """The same with another objective and its defaults, and a model as it was at first."""
        config, kind = replace(self.config, objective=name), objective_class(name)
        networks, _ = input_errors(_networks, config, kind, {}, self.data)
        return replace(self, config=config, kind=kind, options={}, networks=networks)

    def prepare(self) -> Inputs:
        """Where the input of what is trained comes from; the features of a frozen backbone are found first."""
        config = self.config
        evaluate, train, _, mode = self.transforms
        sets = {"images": self.data.images.files, "test": self.data.test.files}
        if not config.freeze_backbone:
            if config.has_weights and is_timm(self.model):
                with self.watch("features"):
                    self.item_features = self._features("images", sets["images"], evaluate, mode)
            datasets = {name: ImageDataset(files, evaluate, mode) for name, files in sets.items()}
            images = ImageInputs(ImageDataset(sets["images"], train, mode), datasets, config)
            for module in self.trained:
                module.to(device=config.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
            return images
        with self.watch("features"):
            features = {name: self._features(name, files, evaluate, mode) for name, files in sets.items() if len(files)}
        self.item_features = features["images"]
        for network in self.networks:
            network.objective.set_feature_dim(features["images"].shape[1])
            network.model.requires_grad_(False)
        for head in (*self.heads, *self.trained):
            head.requires_grad_(True).to(str(config.device))
        return FeatureInputs(features, str(config.device))

    def _features(self, name: str, files: tuple[Path, ...], transform: Any, mode: str) -> Tensor:
        config = self.config
        folder = config.feature_cache or config.out / FEATURES
        device = str(config.device)
        key = features_module.cache_key(files, config.model, self.record["weights"], transform, device, config.amp)
        what = "features" if name == "images" else "test features"
        features, cached = features_module.cached_features(
            files, folder, key, lambda: self._extract(what, files, transform, mode), self.processes
        )
        if cached:
            self.reporter.say(f"{what} of {len(files)} images from {folder}")
        return features

    def _extract(self, what: str, files: tuple[Path, ...], transform: Any, mode: str) -> Tensor:
        device = str(self.config.device)
        part = self.processes.part(len(files), features_module.block_size(device))
        with self.reporter.track(what, len(files[part])) as track:
            own = features_module.extract(
                self.model, files[part], transform, mode, device=device, workers=self.config.workers or 0,
                amp=self.config.amp, advance=track.advance,
            )  # fmt: skip
        table = own.new_zeros(len(files), own.shape[1])
        table[part] = own
        return self.processes.joined(part, table)

    def trainer(self, inputs: Inputs) -> Trainer:
        """What trains on these inputs."""
        config, device = self.config, str(self.config.device)
        steps: Steps
        if self.ccc is not None:
            steps = TwoNetworks(self.ccc.to(device), inputs, self.parts[0], config, self.processes)
        else:
            identity = nn.Identity() if config.freeze_backbone else None
            model = attach(self.trained[0], self.networks[0].objective, features=identity).to(device)
            steps = OneNetwork(model, self.parts[0], config, self.processes)
        trainer = Trainer(
            steps, inputs, *self.parts, self.data.test.truth, config, config.out, self.reporter, self.processes
        )
        gold = self.data.gold >= 0
        if bool(gold.any()):
            trainer.rows = ((trainer.annotations.counts > 0) | gold).nonzero()[:, 0]
        return trainer

    def finish(self, trainer: Trainer, progress: Progress) -> Result:
        """Predict everything once more and write it all down."""
        logits, _ = trainer.predict("images", torch.arange(len(self.data.images)), out_of_fold=True)
        test_logits, _ = trainer.predict("test", torch.arange(len(self.data.test)))
        if self.item_features is None and is_timm(self.model):  # random ones before training say nothing
            self.item_features = self._extract("features", self.data.images.files, *self.transforms[::3])
        found, estimates = self.processes.from_first(self._write, trainer, progress, logits, test_logits)
        for network in self.networks:
            network.model.eval()
        for line in summary(found, self.config.out):
            self.reporter.say(line)
        return Result(self.config.out, found, estimates, self.data, self.model, trainer.model.objective)

    def _write(
        self, trainer: Trainer, progress: Progress, logits: Tensor, test_logits: Tensor
    ) -> tuple[dict[str, Any], outputs.Estimates]:
        config, out, objective = self.config, self.config.out, trainer.model.objective
        estimates = outputs.estimate(
            objective, logits, self.data.annotations, self.item_features, self.data.gold, test_logits
        )
        outputs.write_tables(out, self.data, estimates, progress.history)
        selected_accuracy = None
        if progress.selected_epoch is not None:
            selected_accuracy = progress.history[progress.selected_epoch - 1]["test_accuracy"]
            self._save_selected(trainer.model)
        self._save(out)
        if objective.predicts:
            self.reporter.say(
                f"note: model.safetensors is the classifier alone; {config.objective} predicts with "
                "objective.safetensors on its features"
            )
        if len(self.networks) > 1:
            self.reporter.say(
                f"note: {config.objective} predicts with the mean of two models, the other one is in {OTHER}/"
            )
        a = self.data.annotations
        found: dict[str, Any] = {
            "crowdnal": crowdnal.__version__,
            "command": self.processes.command(self.given.command()),
            "model": config.model,
            "weights": self.origin,
            "objective": repr(objective),
            "arguments": config.to_dict(),
            "comparison": self.record.get("comparison"),
            "device": _device_name(str(config.device)),
            "processes": self.processes.size,
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
        return found, estimates

    def _save_selected(self, model: CrowdModel) -> None:
        last = copy.deepcopy(model.state_dict())
        with reading(
            self.config.out / SELECTED, f"delete it and {CHECKPOINT}, and --resume begins with the first epoch"
        ):
            model.load_state_dict(load_state(self.config.out / SELECTED)["model"])
        self._save(self.config.out / "model_selected")
        model.load_state_dict(last)

    def _save(self, folder: Path) -> None:
        if isinstance(self.trained[0], CrossFit):
            self.heads[0].load_state_dict(self.trained[0].averaged())
        for network, place in zip(self.networks, (folder, folder / OTHER), strict=False):
            with writing(place / outputs.MODEL_FILES[0]):
                outputs.save_model(place, *network, self.data.classes, self.input_size)


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


def input_errors(function: Any, *arguments: Any, **options: Any) -> Any:
    """Call with what the user gave: a ValueError is about that."""
    try:
        return function(*arguments, **options)
    except ValueError as error:
        raise InputError(str(error)) from error


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device} ({platform.processor() or platform.machine()})"
