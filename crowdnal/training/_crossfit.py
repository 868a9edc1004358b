"""Cross-fitting: what is predicted of a training item comes from a network that never saw the item's labels."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from crowdnal._utils.folds import deal
from crowdnal._utils.options import check_integer
from crowdnal.data import Annotations
from crowdnal.objectives import GIVE, ItemNumbers, item_rows, row_table


class CrossFit(nn.Module):
    """Copies of a classifier: each trains on the items outside its fold, and tells the objective of those in it.

        model = crowdnal.attach(crowdnal.CrossFit(head, annotations), crowdnal.DLEM(8, 59))

    A classifier that was trained on an item's labels repeats them, and an objective that combines its scores with these
    labels counts them twice. Here the items are dealt into folds (Chernozhukov et al. 2018); the loss of a batch is the
    mean of the copies', each of the items outside its own fold and with the gradient that it would have alone, while
    the parameters of the objective belong to all. The scores that rounds are made from
    (:class:`crowdnal.ObjectiveCallback`, and the ``logits`` beside a loss) are of the copy that did not train on the
    item: labels still tell of it through the confusions of their annotators, as in any EM. ``model(images)`` are the
    mean logits of the copies, which of linear ones are those of :meth:`averaged`.

    All copies begin as the classifier is. A step takes as long as so many classifiers: for heads on frozen features.
    Only labels are kept from a copy: batch normalisation sees all items.

    Args:
        model: gives logits ``[B, C]``; it is copied, and stays what it is.
        annotations: of the whole training set, by whose ``item_id`` (or ids) batches tell their items.
        folds: K, 2 or more; with fewer items some stay empty.
        seed: of the folds.

    Attributes:
        copies: the K classifiers.
        fold: ``[N]`` of each item, on every machine the same.
    """

    fold: Tensor

    def __init__(self, model: nn.Module, annotations: Annotations, *, folds: int = 5, seed: int = 0) -> None:
        super().__init__()
        check_integer(2, folds=folds)
        self.copies = nn.ModuleList(copy.deepcopy(model) for _ in range(folds))
        self.register_buffer("fold", deal(len(annotations), folds, seed))
        item_id = annotations.item_id
        self._row_of = row_table(None if item_id is None else item_id.cpu())
        self._numbers = ItemNumbers(annotations.vocabulary)

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Mean logits ``[B, C]``."""
        return self.scores(*inputs, **named).mean(0)

    def scores(self, *inputs: Any, **named: Any) -> Tensor:
        """``[K, B, C]`` logits of each copy."""
        return torch.stack([_logits(each(*inputs, **named)) for each in self.copies])

    def fold_of(self, annotations: Annotations) -> Tensor:
        """``[B]`` folds of the items of a batch, on the CPU.

        Raises:
            ValueError: nobody said which items these are, or one is not of the training set.
        """
        item_id, size = self._numbers.of(annotations), len(self.fold)
        if item_id is not None:
            return self.fold.cpu()[item_rows(item_id.cpu(), self._row_of, size)]
        if len(annotations) == size:
            return self.fold.cpu()
        raise ValueError(
            f"annotations have no item_id and {len(annotations)} items, but CrossFit was given {size}: {GIVE}"
        )

    def no_weight_decay(self) -> set[str]:
        """Names, as timm's optimizers ask for them."""
        own: Any = getattr(self.copies[0], "no_weight_decay", set)
        return {f"copies.{k}.{name}" for k in range(len(self.copies)) for name in own()}

    @torch.no_grad()
    def averaged(self) -> dict[str, Tensor]:
        """Mean state of the copies: one classifier with the logits of all, where these are linear in the state."""
        states = [each.state_dict() for each in self.copies]
        return {
            name: torch.stack([state[name] for state in states]).mean(0) if value.is_floating_point() else value
            for name, value in states[0].items()
        }


def out_of_fold(scores: Tensor, fold: Tensor) -> Tensor:
    """``[B, C]`` of ``[K, B, C]``: each item's by the copy of its fold, which did not train on it."""
    return scores[fold.to(scores.device), torch.arange(len(fold), device=scores.device)]


def _logits(output: Any) -> Tensor:
    logits: Tensor = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
    return logits.flatten(0, -2)  # of tokens: an item each
