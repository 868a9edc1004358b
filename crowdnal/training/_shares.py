"""What each batch of a step counts, where several make one: gradient accumulation, several processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from crowdnal._utils.distributed import num_processes, sum_over_processes
from crowdnal.data import Annotations
from crowdnal.objectives import Objective
from crowdnal.training._crossfit import CrossFit
from crowdnal.training._model import unwrapped


def batch_shares(model: nn.Module, batches: Sequence[Annotations]) -> Tensor:
    """``[k]`` factors of the losses of k batches, by which their sum has the gradient of all of them joined.

    A mean over annotations is not the mean of the batches' means where they hold different numbers of them. Under
    several processes the joined batch is that of all, and what averages gradients (``DistributedDataParallel``) is
    counted in; one number is summed over the processes for each call.

        for batches in groups_of(loader, k):
            for (images, annotations), share in zip(batches, crowdnal.batch_shares(model, [a for _, a in batches])):
                (share * model(images, annotations).loss).backward()
            optimizer.step(); optimizer.zero_grad()

    Exact for every objective whose loss is a sum over annotations or items; not for what compares the items of a batch
    (``MaxMIG``, GeoCrowdNet's log det of predictions) or is of the annotators in it (``scope="batch"``), and of a
    penalty beside ``reduction="sum"``, which every batch adds.

    Args:
        model: a CrowdModel (in whatever wraps it), or an objective.
        batches: of the annotations of one step of this process.

    Raises:
        ValueError: the model is a :class:`crowdnal.CrossFit`.
    """
    if isinstance(model, Objective):
        objective = model
    else:
        crowd = unwrapped(model)
        objective = crowd.objective
        if isinstance(crowd.backbone, CrossFit):
            raise ValueError("model is a CrossFit, whose copies each have shares of their own: give it whole steps")
    if objective.reduction in ("sum", "none"):
        device = batches[0].device if batches else None
        return torch.full((len(batches),), float(num_processes()), device=device)
    units = torch.stack([objective.units(annotations).detach().float() for annotations in batches])
    total = sum_over_processes(units.sum())
    return num_processes() * units / total.where(total > 0, 1.0)
