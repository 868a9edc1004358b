"""What a run does around its batches: a step of one network, or of the two of CCC, and what comes between epochs."""

from __future__ import annotations

import difflib
import inspect
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from crowdnal._utils.extras import require
from crowdnal.ccc import CCC, joint
from crowdnal.data import Annotations, CrowdDataset
from crowdnal.objectives import Predict
from crowdnal.train.config import InputError, TrainConfig
from crowdnal.train.inputs import Inputs
from crowdnal.train.processes import Processes
from crowdnal.training import CrowdModel, ObjectiveCallback, batch_shares, param_groups


class Steps(Protocol):
    """How a run trains; the model predicts, and holds all that a checkpoint keeps beside the optimizers."""

    model: CrowdModel
    optimizers: tuple[torch.optim.Optimizer, ...]

    def begin(self, epoch: int, predict: Predict) -> None:
        """Training begins, or goes on, with this epoch; ``predict`` gives logits and features of all images."""
        ...

    def on_epoch_start(self, epoch: int) -> None:
        """Before every epoch."""
        ...

    def on_epoch_end(self, epoch: int) -> None:
        """After it."""
        ...

    def step(self, inputs: Tensor, annotations: Annotations) -> Tensor:
        """Moves the weights; what the loss of the batch ``[]`` has of this process's part of it, detached."""
        ...


class OneNetwork:
    """One network with an objective."""

    def __init__(
        self, model: CrowdModel, annotations: Annotations, config: TrainConfig, processes: Processes | None = None
    ) -> None:
        self.model, self.amp, self.processes = model, config.amp, processes or Processes()
        self.trained: nn.Module = model
        if self.processes.size > 1:
            # running statistics are averaged after an epoch instead, targets are the same everywhere
            known = inspect.signature(DistributedDataParallel).parameters
            buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
            options: Any = {buffers: False}
            self.trained = DistributedDataParallel(model, **options)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (_optimizer(model, config),)
        self.callback = ObjectiveCallback(model, (), annotations)

    def begin(self, epoch: int, predict: Predict) -> None:
        """See :class:`Steps`."""
        self.callback.begin(epoch, predict)

    def on_epoch_start(self, epoch: int) -> None:
        """See :class:`Steps`."""
        self.callback.on_epoch_start(epoch)

    def on_epoch_end(self, epoch: int) -> None:
        """See :class:`Steps`."""
        self.callback.on_epoch_end(epoch)
        self.processes.average_buffers(self.model.backbone)

    def step(self, inputs: Tensor, annotations: Annotations) -> Tensor:
        """See :class:`Steps`."""
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.amp):
            loss = self.trained(inputs, annotations).loss
        if self.processes.size > 1:  # gradients are averaged over the processes, so that this is the joined batch's
            loss = loss * batch_shares(self.model, [annotations])[0]
        (optimizer,) = self.optimizers
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach() / self.processes.size


class TwoNetworks:
    """The two networks of CCC, which correct each other."""

    def __init__(
        self, ccc: CCC, inputs: Inputs, annotations: Annotations, config: TrainConfig,
        processes: Processes | None = None,
    ) -> None:  # fmt: skip
        self.processes = processes or Processes()
        self.ccc, self.inputs, self.annotations, self.config = ccc, inputs, annotations, config
        self.model = joint(ccc)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = tuple(
            _optimizer(model, config) for model in (ccc.model_a, ccc.model_b)
        )

    def begin(self, epoch: int, predict: Predict) -> None:
        """See :class:`Steps`."""
        trained, evaluated = (CrowdDataset(items, self.annotations) for items in self.inputs.items)
        workers = min(self.config.workers or 0, 2)  # of each of two loaders beside that of the batches
        size = max(256, self.config.batch_size or 1)
        self.ccc.on_train_start(trained, evaluation=evaluated, batch_size=size, num_workers=workers)

    def on_epoch_start(self, epoch: int) -> None:
        """See :class:`Steps`."""
        self.ccc.on_epoch_start(epoch)

    def on_epoch_end(self, epoch: int) -> None:
        """See :class:`Steps`."""
        for model in (self.ccc.model_a, self.ccc.model_b):
            self.processes.average_buffers(model.backbone)

    def step(self, inputs: Tensor, annotations: Annotations) -> Tensor:
        """See :class:`Steps`; the mean of both losses."""
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.config.amp):
            found = self.ccc.step((inputs, annotations), *self.optimizers)
        return (found.loss_a + found.loss_b) / 2 / self.processes.size


def check_optimizer(name: str) -> None:
    """Refuse an optimizer that timm does not have."""
    known = require("timm.optim", extra="train").list_optimizers()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=5) or ["adam", "adamw", "sgd"]
        raise InputError(f"--optimizer {name!r} is unknown to timm; near matches: {', '.join(near)}")


def schedules(optimizers: tuple[torch.optim.Optimizer, ...], config: TrainConfig) -> list[Any]:
    """timm's schedule of each optimizer; none where the rates are constant."""
    if config.schedule == "constant":
        return []
    cosine = require("timm.scheduler", extra="train").CosineLRScheduler
    return [cosine(optimizer, t_initial=config.epochs, lr_min=0.0) for optimizer in optimizers]


def _optimizer(model: CrowdModel, config: TrainConfig) -> torch.optim.Optimizer:
    groups = param_groups(model, config.lr or 0.0, config.weight_decay or 0.0, objective_lr=config.objective_lr)
    optim = require("timm.optim", extra="train")
    return optim.create_optimizer_v2(groups, opt=config.optimizer, lr=config.lr, weight_decay=0.0)
