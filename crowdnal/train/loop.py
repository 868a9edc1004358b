"""The training loop: seeded by (seed, epoch), so that a resumed run ends with the weights of an uninterrupted one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from crowdnal import metrics
from crowdnal._utils.extras import require
from crowdnal.data import Annotations
from crowdnal.objectives import RoundsObjective
from crowdnal.train.config import InputError, TrainConfig
from crowdnal.train.data import ImageDataset, derive_seed, seed_everything
from crowdnal.train.files import load_state, save_state
from crowdnal.train.progress import Reporter
from crowdnal.training import CrowdModel, ObjectiveCallback, param_groups, predict_items

CHECKPOINT = "checkpoint.pt"
SELECTED = "checkpoint-selected.pt"

# Below this many multiply-adds a step, threads cost more than they give
_ONE_THREAD = 1 << 24


class Inputs(Protocol):
    """Where batches of what the model takes come from: ``split`` is ``"images"`` or ``"test"``."""

    def train(self, batches: list[Tensor], epoch: int) -> Iterator[Tensor]:
        """Training input of each batch of rows, on the device."""
        ...

    def evaluate(self, split: str, rows: Tensor) -> Iterator[Tensor]:
        """Evaluation input of rows in order, in batches, on the device."""
        ...


class FeatureInputs:
    """Features of a frozen backbone, all on the device."""

    def __init__(self, features: dict[str, Tensor], device: str) -> None:
        self.features = {split: tensor.to(device) for split, tensor in features.items()}

    def train(self, batches: list[Tensor], epoch: int) -> Iterator[Tensor]:
        """See :class:`Inputs`."""
        features = self.features["images"]
        for rows in batches:
            yield features[rows.to(features.device, non_blocking=True)]

    def evaluate(self, split: str, rows: Tensor) -> Iterator[Tensor]:
        """See :class:`Inputs`."""
        features = self.features[split]
        for block in rows.split(8192):
            yield features[block.to(features.device)]


class ImageInputs:
    """Images read by worker processes."""

    def __init__(self, train: ImageDataset, evaluate: dict[str, ImageDataset], config: TrainConfig) -> None:
        self.train_images, self.evaluate_images = train, evaluate
        self.device, self.seed = torch.device(str(config.device)), config.seed
        self.size = config.batch_size or 1
        self.workers = config.workers or 0

    def train(self, batches: list[Tensor], epoch: int) -> Iterator[Tensor]:
        """See :class:`Inputs`."""
        self.train_images.seed = derive_seed(self.seed, "augment", epoch)
        return self._load(self.train_images, [rows.tolist() for rows in batches])

    def evaluate(self, split: str, rows: Tensor) -> Iterator[Tensor]:
        """See :class:`Inputs`."""
        return self._load(self.evaluate_images[split], [block.tolist() for block in rows.split(self.size)])

    def _load(self, images: ImageDataset, batches: list[list[int]]) -> Iterator[Tensor]:
        pin = self.device.type == "cuda"
        # its own generator: a loader draws a seed for its workers, which must not move the epoch's random state
        loader = DataLoader(
            images, batch_sampler=batches, num_workers=min(self.workers, len(batches)), pin_memory=pin,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        for block, _ in loader:
            yield block.to(self.device, non_blocking=pin, memory_format=torch.channels_last)


@dataclass
class Progress:
    """Where training stands: epochs done, a row of numbers each, and the best epoch by held-out annotations."""

    epoch: int = 0
    history: list[dict[str, float | None]] = field(default_factory=list)
    selected_epoch: int | None = None
    selected_value: float | None = None


class Trainer:
    """Trains a :class:`~crowdnal.CrowdModel` on annotations; one object a run.

    Args:
        model: backbone (or the head of a frozen one) with its objective, on the device.
        inputs: what the model takes.
        annotations: of all images, those without annotations included.
        heldout: annotations kept out of training, over the same images, or None.
        test_truth: ``[T]`` classes of the test images; only reported.
        config: resolved.
        out: folder for the checkpoints.
        reporter: for progress.
    """

    def __init__(
        self,
        model: CrowdModel,
        inputs: Inputs,
        annotations: Annotations,
        heldout: Annotations | None,
        test_truth: Tensor,
        config: TrainConfig,
        out: Path,
        reporter: Reporter,
    ) -> None:
        self.model, self.inputs, self.annotations, self.heldout = model, inputs, annotations, heldout
        self.config, self.out, self.reporter = config, out, reporter
        self.device = torch.device(str(config.device))
        self.test_truth = test_truth.to(self.device)
        self.rows = (annotations.counts > 0).nonzero()[:, 0]
        self.optimizer = _optimizer(model, config)
        self.schedule = _schedule(self.optimizer, config)
        self.progress = Progress()
        self.callback = ObjectiveCallback(model, (), annotations)

    def fit(self) -> Progress:
        """Train up to the last epoch, with a checkpoint after each."""
        epochs = self.config.epochs or 0
        threads = torch.get_num_threads()
        if self.config.threads is None and self.device.type == "cpu" and _is_small(self.model, self.config):
            torch.set_num_threads(1)
        cudnn = torch.backends.cudnn
        before = cudnn.deterministic, cudnn.benchmark
        cudnn.deterministic, cudnn.benchmark = True, False
        try:
            everything = torch.arange(len(self.annotations))  # begins before an epoch seeds what it draws
            self.callback.begin(self.progress.epoch, lambda: self.predict("images", everything))
            with self.reporter.track("epoch", epochs, self.progress.epoch) as track:
                while self.progress.epoch < epochs:
                    track.advance(1, self._epoch(self.progress.epoch))
        finally:
            torch.set_num_threads(threads)
            cudnn.deterministic, cudnn.benchmark = before
        return self.progress

    def _epoch(self, epoch: int) -> str:
        seed_everything(derive_seed(self.config.seed, "epoch", epoch))
        order = torch.Generator().manual_seed(derive_seed(self.config.seed, "order", epoch))
        batches = _batches(self.rows[torch.randperm(len(self.rows), generator=order)], self.config.batch_size or 1)
        if self.schedule is not None:
            self.schedule.step(epoch)
        rate = self.optimizer.param_groups[0]["lr"]
        self.callback.on_epoch_start(epoch)
        self.model.train()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for rows, inputs in zip(batches, self.inputs.train(batches, epoch), strict=True):
            annotations = self.annotations[rows]
            if self.device.type == "cuda":
                annotations = annotations.pin_memory().to(self.device, non_blocking=True)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.amp):
                loss = self.model(inputs, annotations).loss
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            total += loss.detach() * len(rows)
        self.callback.on_epoch_end(epoch)
        mean = float(total) / len(self.rows)
        if mean != mean or abs(mean) == float("inf"):
            raise InputError(f"the loss is {mean} in epoch {epoch + 1}: lower --lr or --objective-lr")
        row = {"epoch": epoch + 1, "lr": rate, "train_loss": mean, **self._measure()}
        if isinstance(self.model.objective, RoundsObjective):
            made = self.callback.history[-1:]
            row["round_log_likelihood"] = made[0].log_likelihood if made and made[0].epoch == epoch else None
        return self._finish(row)

    def _measure(self) -> dict[str, float | None]:
        likelihood = accuracy = None
        if self.heldout is not None:
            rows = (self.heldout.counts > 0).nonzero()[:, 0]
            logits, features = self.predict("images", rows)
            heldout = self.heldout[rows].to(self.device)
            likelihood = float(self.model.objective.log_likelihood(logits, heldout, features).double().mean())
        if len(self.test_truth):
            logits, _ = self.predict("test", torch.arange(len(self.test_truth)))
            accuracy = metrics.accuracy(logits, self.test_truth)
        return {"heldout_log_likelihood": likelihood, "test_accuracy": accuracy}

    def _finish(self, row: dict[str, float | None]) -> str:
        progress = self.progress
        progress.history.append(row)
        self.reporter.log(row)
        progress.epoch += 1
        value = row["heldout_log_likelihood"]
        if value is not None and (progress.selected_value is None or value > progress.selected_value):
            progress.selected_epoch, progress.selected_value = progress.epoch, value
            save_state(self.out / SELECTED, {"epoch": progress.epoch, "model": self.model.state_dict()})
        save_state(
            self.out / CHECKPOINT,
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "progress": vars(progress)},
        )
        names = {"train_loss": "loss", "heldout_log_likelihood": "held-out", "test_accuracy": "test"}
        names["round_log_likelihood"] = "round"
        return "  ".join(f"{text} {row[name]:.4f}" for name, text in names.items() if row.get(name) is not None)

    def resume(self) -> None:
        """Take up the last checkpoint, if there is one."""
        path = self.out / CHECKPOINT
        if path.is_file():
            state = load_state(path)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.progress = Progress(**state["progress"])

    def predict(self, split: str, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """The objective's logits ``[n, C]`` in evaluation mode, and features where the objective needs them."""
        blocks = self.inputs.evaluate(split, rows) if len(rows) else ()
        amp = torch.bfloat16 if self.config.amp else None
        return predict_items(self.model, _numbered(blocks), len(rows), amp=amp)


def _numbered(blocks: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks with the places of their rows, one after the other."""
    first = 0
    for block in blocks:
        yield torch.arange(first, first + len(block), device=block.device), block
        first += len(block)


def _batches(rows: Tensor, size: int) -> list[Tensor]:
    batches = list(rows.split(size))
    if len(batches) > 1 and len(batches[-1]) == 1:  # batch normalisation cannot train on one item
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def check_optimizer(name: str) -> None:
    """Refuse an optimizer that timm does not have."""
    known = require("timm.optim", extra="train").list_optimizers()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=5) or ["adam", "adamw", "sgd"]
        raise InputError(f"--optimizer {name!r} is unknown to timm; near matches: {', '.join(near)}")


def _optimizer(model: CrowdModel, config: TrainConfig) -> torch.optim.Optimizer:
    groups = param_groups(model, config.lr or 0.0, config.weight_decay or 0.0, objective_lr=config.objective_lr)
    optim = require("timm.optim", extra="train")
    return optim.create_optimizer_v2(groups, opt=config.optimizer, lr=config.lr, weight_decay=0.0)


def _schedule(optimizer: torch.optim.Optimizer, config: TrainConfig) -> Any:
    if config.schedule == "constant":
        return None
    return require("timm.scheduler", extra="train").CosineLRScheduler(optimizer, t_initial=config.epochs, lr_min=0.0)


def _is_small(model: CrowdModel, config: TrainConfig) -> bool:
    if not config.freeze_backbone:
        return False
    weights = sum(parameter.numel() for parameter in nn.Module.parameters(model.backbone))
    return (config.batch_size or 1) * weights < _ONE_THREAD
