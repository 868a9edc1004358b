"""Parameter groups of an optimizer: the objective's at a rate of their own, without weight decay."""

from __future__ import annotations

import fnmatch
from typing import Any

from torch import nn

from crowdnal.training._model import unwrapped


def param_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, *, objective_lr: float | None = None
) -> list[dict[str, Any]]:
    """Groups for any torch optimizer: backbone with and without weight decay, then the objective without.

    Each matrix of an annotator sees only that annotator's few labels, which may want a rate of its own, and
    weight decay would pull it to what says nothing. Of the backbone, biases and other vectors, and what its
    ``no_weight_decay()`` names, are not decayed, as timm does it.

        optimizer = torch.optim.AdamW(crowdnal.param_groups(model, 1e-4, 0.05))

    Args:
        model: what :func:`crowdnal.attach` returned; compiled or in ``DistributedDataParallel`` too.
        lr: of the backbone.
        weight_decay: of its matrices and kernels.
        objective_lr: default ``lr``, as ``crowdnal train`` has it.

    Returns:
        Up to three groups with ``params``, ``lr``, ``weight_decay`` and ``name``; parameters that are frozen are in
        none.

    Raises:
        TypeError: model is no CrowdModel.
    """
    crowd = unwrapped(model)
    exempt = crowd.no_weight_decay()
    kinds: dict[str, list[nn.Parameter]] = {"backbone": [], "backbone, no decay": [], "objective": []}
    for name, parameter in crowd.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.startswith("objective."):
            kind = "objective"
        elif parameter.ndim <= 1 or name.endswith(".bias") or any(fnmatch.fnmatch(name, wild) for wild in exempt):
            kind = "backbone, no decay"
        else:
            kind = "backbone"
        kinds[kind].append(parameter)
    rates = {"objective": lr if objective_lr is None else objective_lr}
    decays = {"backbone": weight_decay}
    return [
        {"params": params, "lr": rates.get(name, lr), "weight_decay": decays.get(name, 0.0), "name": name}
        for name, params in kinds.items()
        if params
    ]
