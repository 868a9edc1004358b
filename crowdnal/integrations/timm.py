"""timm: a task for its training script, and Mixup and CutMix of items with annotations."""

from __future__ import annotations

from typing import Any

import torch
from timm.data import Mixup
from timm.task import TrainingTask
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from crowdnal.data import Annotations
from crowdnal.objectives import Objective, RoundsObjective
from crowdnal.training import CrowdModel, attach, mixed, unwrapped


class CrowdTask(TrainingTask):
    """Any objective in timm's training script, instead of its ``ClassificationTask``.

        task = CrowdTask(model, crowdnal.CrowdLayer(8, 59), device=device)
        optimizer = create_optimizer_v2(task.get_trainable_module(), opt="adamw", lr=1e-3, weight_decay=0.05)
        result = task(images, annotations)
        result["loss"].backward()

    Validation and checkpoints are of the plain model (of the CrowdModel, for an objective that predicts in a way of its
    own); the objective is in the task's own state. EM-style objectives:
    ``crowdnal.ObjectiveCallback(task.get_trainable_module(), loader)``.

    Args:
        model: of timm, or what :func:`crowdnal.attach` takes.
        objective: its criterion.
        device: of the objective; the model is on it already.
        dtype: of the task.
        verbose: not used.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        verbose: bool = True,
    ) -> None:
        super().__init__(device=device, dtype=dtype, verbose=verbose)
        self.trainable_module: nn.Module = attach(model, objective.to(self.device))

    def prepare_distributed(self, device_ids: list[Any] | None = None, **ddp_kwargs: Any) -> CrowdTask:
        """In ``DistributedDataParallel``."""
        self.trainable_module = nn.parallel.DistributedDataParallel(
            self.trainable_module, device_ids=device_ids, **ddp_kwargs
        )
        return self

    def compile(self, backend: str = "inductor", mode: str | None = None, **options: Any) -> nn.Module | None:
        """The model with its objective, before the distributed wrapping."""
        compiled: Any = torch.compile(self.trainable_module, backend=backend, mode=mode, **options)
        self.trainable_module = compiled
        return self.get_eval_model()

    def setup_ema(self, decay: float = 0.9999, **options: Any) -> nn.Module:
        """Averages the CrowdModel; the plain model alone where the objective keeps targets, which are no weights."""
        self.trainable_module_ema = ModelEmaV3(self._averaged(), decay=decay, **options)
        return self.trainable_module_ema

    def update_ema(self, step: int | None = None) -> None:
        """After every step."""
        if self.has_ema():
            self.trainable_module_ema.update(self._averaged(), step=step)

    def _averaged(self) -> nn.Module:
        crowd = unwrapped(self.trainable_module)
        return crowd.backbone if isinstance(crowd.objective, RoundsObjective) else crowd

    def get_eval_model(self, module: nn.Module | None = None, ema: bool = False) -> nn.Module | None:
        """What validation runs and checkpoints hold."""
        module = self.get_trainable_module(ema=ema) if module is None else module
        if isinstance(module, ModelEmaV3) and not isinstance(module.module, CrowdModel):
            return module.module
        if module is None:
            return None
        crowd = unwrapped(module)
        return crowd if crowd.objective.predicts else crowd.backbone

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> dict[str, Any]:
        """The objective's, beside the plain model's."""
        module = self.get_trainable_module(ema=ema) if module is None else module
        if module is None or (ema and not isinstance(getattr(module, "module", None), CrowdModel)):
            return {}
        return {"objective": unwrapped(module).objective.state_dict()}

    def load_task_state(
        self,
        state: dict[str, Any] | None,
        strict: bool = True,
        module: nn.Module | None = None,
        ema: bool = False,
    ) -> None:
        """The objective's; a checkpoint of another task has none."""
        module = self.get_trainable_module(ema=ema) if module is None else module
        if state and module is not None:
            unwrapped(module).objective.load_state_dict(state["objective"], strict=strict)

    def forward(self, input: Tensor, target: Annotations | Tensor) -> dict[str, Tensor]:
        """``loss`` and ``output``, the logits, of images ``[B, ...]`` and their annotations."""
        loss, output = self.trainable_module(input, target)
        return {"loss": loss, "output": output}


class CrowdMixup(Mixup):
    """timm's Mixup and CutMix for ``(images, annotations)``: an item has the labels of both, weighted by their shares.

    For a loss that is a sum over annotations this is the mixture of both losses. Which item an item is can no longer be
    said, so that objectives with stored targets refuse it. ``label_smoothing`` and ``num_classes`` are not used.
    """

    def __call__(self, x: Tensor, target: Annotations) -> tuple[Tensor, Annotations]:
        """Images mixed in place, each with that at its place from the end."""
        if len(x) % 2:
            raise ValueError(f"a batch of {len(x)} items: Mixup needs an even number (drop_last=True)")
        mix: Any = {"elem": self._mix_elem, "pair": self._mix_pair}.get(self.mode, self._mix_batch)
        share = torch.as_tensor(mix(x)).flatten().to(target.device)
        rows = torch.arange(len(x) - 1, -1, -1, device=target.device)
        return x, mixed(target, rows, share.expand(len(x)))
