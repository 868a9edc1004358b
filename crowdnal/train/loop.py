"""The training loop: seeded by (seed, epoch), so that a resumed run ends with the weights of an uninterrupted one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from crowdnal import metrics
from crowdnal._utils.distributed import sum_over_processes
from crowdnal._utils.threads import threads, threads_of_step
from crowdnal.data import Annotations
from crowdnal.objectives import RoundsObjective
from crowdnal.train.config import InputError, TrainConfig
from crowdnal.train.data import derive_seed, seed_everything
from crowdnal.train.files import load_state, save_state
from crowdnal.train.inputs import Inputs
from crowdnal.train.processes import Processes
from crowdnal.train.progress import Reporter
from crowdnal.train.steps import Steps, schedules
from crowdnal.training import predict_items

CHECKPOINT = "checkpoint.pt"
SELECTED = "checkpoint-selected.pt"


@dataclass
class Progress:
    """Where training stands: epochs done, a row of numbers each, and the best epoch by held-out annotations."""

    epoch: int = 0
    history: list[dict[str, float | None]] = field(default_factory=list)
    selected_epoch: int | None = None
    selected_value: float | None = None


class Trainer:
    """Trains on annotations, epoch by epoch; one object a run.

    Args:
        steps: of backbones (or the heads of a frozen one) with their objectives, on the device.
        inputs: what these take.
        annotations: of all images, those without annotations included.
        heldout: annotations kept out of training, over the same images, or None.
        test_truth: ``[T]`` classes of the test images; only reported.
        config: resolved.
        out: folder for the checkpoints.
        reporter: for progress.
        processes: each of which trains on its part of every batch.
    """

    def __init__(
        self,
        steps: Steps,
        inputs: Inputs,
        annotations: Annotations,
        heldout: Annotations | None,
        test_truth: Tensor,
        config: TrainConfig,
        out: Path,
        reporter: Reporter,
        processes: Processes | None = None,
    ) -> None:
        self.steps, self.model, self.inputs = steps, steps.model, inputs
        self.annotations, self.heldout = annotations, heldout
        self.config, self.out, self.reporter = config, out, reporter
        self.processes = processes or Processes()
        self.device = torch.device(str(config.device))
        self.test_truth = test_truth.to(self.device)
        self.rows = (annotations.counts > 0).nonzero()[:, 0]
        self.schedules = schedules(steps.optimizers, config)
        self.progress = Progress()

    def fit(self) -> Progress:
        """Train up to the last epoch, with a checkpoint after each."""
        epochs = self.config.epochs or 0
        cudnn = torch.backends.cudnn
        before = cudnn.deterministic, cudnn.benchmark
        cudnn.deterministic, cudnn.benchmark = True, False
        try:
            everything = torch.arange(len(self.annotations))  # begins before an epoch seeds what it draws
            self.steps.begin(self.progress.epoch, lambda: self.predict("images", everything, out_of_fold=True))
            with threads(self._threads()), self.reporter.track("epoch", epochs, self.progress.epoch) as track:
                while self.progress.epoch < epochs:
                    track.advance(1, self._epoch(self.progress.epoch))
        finally:
            cudnn.deterministic, cudnn.benchmark = before
        return self.progress

    def _threads(self) -> int | None:
        if not self.config.freeze_backbone:  # convolutions: more than their parameters tell
            return None
        return self.config.threads or threads_of_step(self.model.backbone, self.config.batch_size or 1)

    def _epoch(self, epoch: int) -> str:
        seed_everything(derive_seed(self.config.seed, "epoch", epoch))
        order = torch.Generator().manual_seed(derive_seed(self.config.seed, "order", epoch))
        size, several = self.config.batch_size or 1, self.processes.size
        batches = _batches(self.rows[torch.randperm(len(self.rows), generator=order)], size, several)
        for schedule in self.schedules:
            schedule.step(epoch)
        rate = self.steps.optimizers[0].param_groups[0]["lr"]
        self.steps.on_epoch_start(epoch)
        self.model.train()
        if several > 1:  # what is drawn for one part of a batch is not drawn for another
            seed_everything(derive_seed(self.config.seed, "epoch", epoch, self.processes.rank))
        parts = [rows[self.processes.rank :: several] for rows in batches]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for rows, part, inputs in zip(batches, parts, self.inputs.train(parts, epoch), strict=True):
            annotations = self.annotations[part]
            if self.device.type == "cuda":
                annotations = annotations.pin_memory().to(self.device, non_blocking=True)
            total += self.steps.step(inputs, annotations) * len(rows)
        self.steps.on_epoch_end(epoch)
        mean = float(sum_over_processes(total)) / len(self.rows)
        if mean != mean or abs(mean) == float("inf"):
            raise InputError(f"the loss is {mean} in epoch {epoch + 1}: lower --lr or --objective-lr")
        row = {"epoch": epoch + 1, "lr": rate, "train_loss": mean, **self._measure()}
        if isinstance(self.model.objective, RoundsObjective):
            made = self.model.objective.history[-1:]
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
        better = value is not None and (progress.selected_value is None or value > progress.selected_value)
        if better:
            progress.selected_epoch, progress.selected_value = progress.epoch, value
        self.processes.from_first(self._save, better)
        names = {"train_loss": "loss", "heldout_log_likelihood": "held-out", "test_accuracy": "test"}
        names["round_log_likelihood"] = "round"
        return "  ".join(f"{text} {row[name]:.4f}" for name, text in names.items() if row.get(name) is not None)

    def _save(self, selected: bool) -> None:
        model = self.model.state_dict()
        if selected:
            save_state(self.out / SELECTED, {"epoch": self.progress.epoch, "model": model})
        optimizers = [optimizer.state_dict() for optimizer in self.steps.optimizers]
        state = {"model": model, "optimizers": optimizers, "progress": vars(self.progress)}
        save_state(self.out / CHECKPOINT, state)

    def resume(self) -> None:
        """Take up the last checkpoint, if there is one."""
        path = self.out / CHECKPOINT
        state = self.processes.from_first(lambda: load_state(path) if path.is_file() else None)
        if state is not None:
            self.model.load_state_dict(state["model"])
            for optimizer, own in zip(self.steps.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(own)
            self.progress = Progress(**state["progress"])

    def predict(self, split: str, rows: Tensor, *, out_of_fold: bool = False) -> tuple[Tensor, Tensor | None]:
        """The objective's logits ``[n, C]`` in evaluation mode, and features where the objective needs them.

        Args:
            split: of the inputs.
            rows: of the split.
            out_of_fold: with ``--cross-fit``, each by the head that did not train on it; rows are then all images.
        """
        part = self.processes.part(len(rows))
        blocks = self.inputs.evaluate(split, rows[part]) if len(rows) else ()
        amp = torch.bfloat16 if self.config.amp else None
        found = predict_items(self.model, _numbered(blocks, part.start), len(rows), amp=amp, out_of_fold=out_of_fold)
        logits, features = (None if table is None else self.processes.joined(part, table) for table in found)
        assert logits is not None
        return logits, features


def _numbered(blocks: Iterable[Tensor], first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks with the places of their rows, one after the other."""
    for block in blocks:
        yield torch.arange(first, first + len(block), device=block.device), block
        first += len(block)


def _batches(rows: Tensor, size: int, processes: int = 1) -> list[Tensor]:
    if min(size, len(rows)) < processes:
        raise InputError(
            f"{len(rows)} images to train on, --batch-size {size}: each of {processes} processes needs one of every "
            "batch; start fewer"
        )
    batches = list(rows.split(size))
    if len(batches) > 1 and len(batches[-1]) < 2 * processes:  # batch normalisation cannot train on one item
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches
