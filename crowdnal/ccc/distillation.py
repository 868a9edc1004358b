"""Meta sets: for each class the items that a classifier finds most like it, among those somebody gave this label."""

from __future__ import annotations

import torch
from torch import Tensor

from crowdnal.data import Annotations


@torch.no_grad()
def distill(logits: Tensor, annotations: Annotations, meta_size: int) -> tuple[Tensor, Tensor]:
    """Class-balanced distillation (Zhang et al. 2024, "Distilling Meta Sets using Two Models").

    For every class c, of all items that some annotator labelled c (with a weight above 0), the ``meta_size // C`` with
    the smallest cross-entropy of the classifier against c, earlier items first among equals; all of them where there
    are fewer. An item may be there for several classes.

    Args:
        logits: ``[N, C]`` of the *other* model's backbone, in evaluation mode.
        annotations: of the N items.
        meta_size: M, at least C.

    Returns:
        Rows ``[M']`` of items and their pseudo labels ``[M']``, class by class, on the CPU.

    Raises:
        ValueError: no label is left.
    """
    per_class = meta_size // logits.shape[1]
    loss = -logits.double().cpu().log_softmax(-1)
    labelled = annotations.to("cpu").votes() > 0
    loss = torch.where(labelled, loss, torch.inf)
    smallest, rows = (found[:per_class].T for found in loss.sort(dim=0, stable=True))
    kept = smallest.isfinite()
    if not bool(kept.any()):
        raise ValueError("no item has a label with a finite loss, so that there is no meta set: check the annotations")
    labels = torch.arange(logits.shape[1]).unsqueeze(1).expand_as(rows)
    return rows[kept], labels[kept]
