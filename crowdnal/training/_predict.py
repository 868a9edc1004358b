"""Predictions of many items by a model in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from crowdnal.training._fsdp import gathering
from crowdnal.training._model import CrowdModel
from crowdnal.training._timm import evaluating


@torch.no_grad()
def predict_items(
    model: CrowdModel,
    batches: Iterable[tuple[Tensor, Any]],
    num_items: int,
    *,
    amp: torch.dtype | None = None,
    out_of_fold: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The objective's logits ``[N, C]`` and, where it needs them, features ``[N, D]``: float32 at least.

    Args:
        model: whose mode is as it was afterwards.
        batches: rows ``[B]`` below N, and what the model takes of these items, on its device.
        num_items: N. Rows that no batch has are 0.
        amp: autocast dtype, None for none.
        out_of_fold: the rows are those of the training set, and no item is predicted by what trained on it, where the
            model is a :class:`CrossFit`.
    """
    tables: list[Tensor] = []
    with evaluating(model):
        for rows, images in batches:
            with torch.autocast(rows.device.type, amp, enabled=amp is not None):
                logits, features = gathering(model, "predicted").predicted(images, rows if out_of_fold else None)
                given = [logits, *([] if features is None else [features])]
            for part in given[len(tables) :]:  # of the first batch
                kind = torch.promote_types(part.dtype, torch.float32)
                tables.append(part.new_zeros(num_items, *part.shape[1:], dtype=kind))
            for table, part in zip(tables, given, strict=True):
                table.index_copy_(0, rows, part.to(table))
    torch.clear_autocast_cache()  # an outer autocast would go on with weights that were cast without a gradient
    if not tables:
        return torch.zeros(num_items, model.objective.num_classes, device=device_of(model)), None
    return tables[0], tables[1] if len(tables) > 1 else None


def device_of(model: nn.Module) -> torch.device:
    """That of its parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))
