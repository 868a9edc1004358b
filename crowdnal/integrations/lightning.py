"""Lightning: a module that trains any objective, and a callback that calls its hooks in a module of yours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from crowdnal.data import Annotations
from crowdnal.training import CrowdModel, ObjectiveCallback, param_groups


class CrowdCallback(Callback):
    """Calls the hooks of the objective in any ``LightningModule`` that has a CrowdModel; EM-style ones need them.

    Args:
        loader: as of :class:`crowdnal.ObjectiveCallback`; default the loader that trains, which must then give every
            item once: no augmentation, ``drop_last=False``.
        annotations: of the training set; default those of the loader's ``CrowdDataset``.
    """

    def __init__(self, loader: Iterable[Any] | None = None, annotations: Annotations | None = None) -> None:
        self.loader, self.annotations = loader, annotations
        self.callback: ObjectiveCallback | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins, or goes on after a checkpoint."""
        found = [module for module in pl_module.modules() if isinstance(module, CrowdModel)]
        if len(found) != 1:
            raise ValueError(
                f"{type(pl_module).__name__} has {len(found)} CrowdModels but must have one: crowdnal.attach"
            )
        loader = trainer.train_dataloader if self.loader is None else self.loader
        self.callback = ObjectiveCallback(found[0], loader, self.annotations)
        self.callback.begin(trainer.current_epoch)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A round, where one is due."""
        assert self.callback is not None
        self.callback.on_epoch_start(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After every epoch."""
        assert self.callback is not None
        self.callback.on_epoch_end(trainer.current_epoch)


class CrowdModule(LightningModule):
    """Trains a CrowdModel; batches are ``(images, annotations)``, those of validation ``(images, true classes)``.

    Logs ``train_loss`` and ``val_accuracy``. Override what you want otherwise.

    Args:
        model: of :func:`crowdnal.attach`.
        lr: as of :func:`crowdnal.param_groups`, like the next two; the optimizer is AdamW.
        weight_decay: see there.
        objective_lr: see there.
    """

    def __init__(
        self, model: CrowdModel, lr: float = 1e-3, weight_decay: float = 0.0, objective_lr: float | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.lr, self.weight_decay, self.objective_lr = lr, weight_decay, objective_lr

    def forward(self, images: Any) -> Tensor:
        """Logits ``[B, C]``."""
        return self.model(images)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        images, annotations = batch
        loss: Tensor = self.model(images, annotations).loss
        self.log("train_loss", loss, batch_size=len(annotations))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Accuracy against true classes ``[B]``."""
        images, truth = batch
        right = (self.model(images).argmax(-1) == truth).float().mean()
        self.log("val_accuracy", right, batch_size=len(truth))

    def configure_optimizers(self) -> Any:
        """AdamW, the objective at a rate of its own and without weight decay."""
        return torch.optim.AdamW(
            param_groups(self.model, self.lr, self.weight_decay, objective_lr=self.objective_lr), lr=self.lr
        )

    def configure_callbacks(self) -> list[Callback]:
        """Calls the objective's hooks, with the loader that trains; a CrowdCallback of the trainer's replaces it."""
        return [CrowdCallback()]
