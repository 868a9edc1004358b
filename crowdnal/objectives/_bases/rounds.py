"""EM-style objectives: targets are refreshed between epochs, from the classifier's predictions of all items."""

from __future__ import annotations

import time
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import Tensor
from typing_extensions import override

from crowdnal._utils.options import check_integer
from crowdnal.aggregation import vote_proportions
from crowdnal.data import Annotations, as_annotations, of_classes
from crowdnal.objectives._bases.base import Objective, ObjectiveOptions, Predict
from crowdnal.objectives._bases.batch import Batch
from crowdnal.objectives._bases.cross_entropy import Target
from crowdnal.objectives._bases.history import Round, from_tensor, to_tensor
from crowdnal.objectives._bases.item_rows import GIVE, ItemNumbers, item_rows, row_table
from crowdnal.objectives._bases.run_state import RunState, of_run
from crowdnal.objectives._bases.targets import labelled

CALL = (
    "before the first epoch call on_train_start(annotations, predict) with the whole training set, or on_train_resume "
    "after loading a checkpoint, as crowdnal.ObjectiveCallback(model, loader) does"
)
"""What an error says that comes of a missing hook."""


class RoundsOptions(ObjectiveOptions, total=False):
    """Those of :class:`RoundsObjective`."""

    epochs_per_round: int


class RoundsObjective(Objective):
    """Base of objectives that keep a distribution over the true class of every item of the training set.

    The first targets are the proportions of an item's votes. Before each ``epochs_per_round``-th epoch but the first,
    ``_round`` replaces them, given the classifier's predictions of the whole training set. A method implements
    ``_round`` and, for what it knows beforehand, ``_init_targets``; the loss is the cross-entropy against the targets.

    Needs ``on_train_start(annotations, predict)``, or ``on_train_resume`` where a checkpoint was loaded, and
    ``on_epoch_start``: :class:`crowdnal.ObjectiveCallback` and ``crowdnal train`` call them. A batch's ``item_id`` are
    those of the training set (row numbers, where it has none). Under several processes each is given the whole training
    set and all predictions, and makes the same round.

    Args:
        epochs_per_round: epochs between two refreshed targets (of an M-step), 1 or more.
    """

    stored: ClassVar[tuple[str, ...]] = ("targets",)
    """Tensors of the run (`RunState`) that the state has, beside the history; a checkpoint decides their sizes."""

    cross_entropy_with: Target = "targets"
    targets: Tensor = of_run("targets")
    _row_of: Tensor | None = of_run("_row_of")

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        epochs_per_round: int = 1, **common: Unpack[ObjectiveOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, **common)
        check_integer(1, epochs_per_round=epochs_per_round)
        self.epochs_per_round = epochs_per_round
        self._run = RunState(torch.zeros(0, num_classes))
        self._row_of = None
        self._numbers = ItemNumbers(None)
        self._annotations: Annotations | None = None
        self._predict: Predict | None = None
        self._loaded = False

    @property
    def history(self) -> list[Round]:
        """What the rounds reported; the state has the last 1,024."""
        return self._run.history

    @history.setter
    def history(self, history: list[Round]) -> None:
        self._run.history = history

    # Hooks

    @override
    def on_train_start(self, annotations: Annotations | None = None, predict: Predict | None = None) -> None:
        """Makes the first targets, or keeps those that a checkpoint brought since the last one."""
        if annotations is None:
            return
        self._run.begin()
        if self._loaded:
            self.on_train_resume(annotations, predict)
            return
        annotations = self._remember(annotations, predict)
        self.history = []
        with torch.no_grad():
            self._init_targets(annotations)

    @override
    def on_train_resume(self, annotations: Annotations | None = None, predict: Predict | None = None) -> None:
        """Goes on with the targets that a checkpoint brought.

        Raises:
            ValueError: they are of another number of items.
        """
        if annotations is None:
            return
        self._run.begin()
        if len(self.targets) != len(annotations):
            raise ValueError(
                f"annotations has {len(annotations)} items but the targets in use are of {len(self.targets)}: resume "
                "with the training set of the checkpoint, or make a new objective for another one"
            )
        self._remember(annotations, predict)
        self._loaded = False

    @override
    def on_epoch_start(self, epoch: int) -> None:
        """Makes a round where one is due."""
        if not self._due(epoch):
            return
        if self._annotations is None or self._predict is None:
            raise RuntimeError(f"{type(self).__name__} needs all annotations and predictions in every round: {CALL}")
        started = time.perf_counter()
        with torch.no_grad():
            logits, features = self._predict()
            self._annotations = self._annotations.to(logits.device)
            likelihood = self._round(self.as_batch(logits, self._annotations, features))
        number = self.history[-1].round + 1 if self.history else 1
        self.history.append(Round(number, epoch, float(likelihood), time.perf_counter() - started))

    def _due(self, epoch: int) -> bool:
        return epoch > 0 and epoch % self.epochs_per_round == 0

    # For methods

    def _init_targets(self, annotations: Annotations) -> None:
        """Sets the first targets, given the whole training set."""
        self._set_targets(vote_proportions(of_classes(annotations, self.num_classes), self.num_classes))

    def _round(self, batch: Batch) -> float | Tensor:
        """A round: sets the targets anew, from a batch of all N items.

        Returns:
            The log-likelihood of the annotations, before anything of the annotators' model is changed.
        """
        raise NotImplementedError

    def _set_targets(self, targets: Tensor) -> None:
        if self.targets.shape != targets.shape:
            self.targets = torch.empty_like(targets, dtype=self.targets.dtype, device=self.targets.device)
        self.targets.copy_(targets)  # in place: a captured CUDA graph reads where it did

    def _rows(self, annotations: Annotations) -> Tensor:
        """``[B, C]`` targets of the items of a batch.

        Raises:
            ValueError: naming the item that the training set does not have.
            RuntimeError: there are no targets yet.
        """
        items = len(self.targets)
        if items == 0 and len(annotations) > 0:
            raise RuntimeError(f"{type(self).__name__} has no targets yet: {CALL}")
        item_id = self._numbers.of(annotations)
        if item_id is None:
            if not self._are_all(annotations):
                raise ValueError(
                    f"annotations have no item_id and {len(annotations)} items, but the training set has {items}, so "
                    f"that nobody knows whose targets are theirs: {GIVE}"
                )
            return self.targets[: len(annotations)]
        return self.targets[item_rows(item_id, self._row_of, items)]

    def _are_all(self, annotations: Annotations) -> bool:
        """Whether a batch that does not say so can only be the training set; labels on a GPU are not read."""
        whole = self._annotations
        if len(annotations) in (0, len(self.targets)):
            if whole is None or torch.compiler.is_compiling() or annotations.device.type != "cpu":
                return True
            ours = annotations.num_annotations <= whole.num_annotations  # some may have been taken out
            return ours and bool((annotations.votes(False) <= whole.votes(False).to("cpu")).all())
        return False

    def _loss(self, batch: Batch) -> Tensor:
        targets = self._counted(batch.annotations).to(batch.logits.dtype)
        return self.cross_entropy.of_targets(batch.logits, targets, batch.reduction)

    @override
    def _units(self, annotations: Annotations) -> Tensor:
        if self.class_weight is None:
            return self._informed(annotations).sum()
        return self.cross_entropy.units_of(self._counted(annotations)).sum()

    def _counted(self, annotations: Annotations) -> Tensor:
        """``[B, C]`` targets, 0 for items that do not count."""
        return self._rows(annotations).where(self._informed(annotations).unsqueeze(1), 0.0)

    def _informed(self, annotations: Annotations) -> Tensor:
        """``[B]`` whether the targets of an item say more than the classifier does: it has labels."""
        return labelled(annotations)

    # State

    def _remember(self, annotations: Annotations, predict: Predict | None) -> Annotations:
        sizes = {"num_annotators": self.num_annotators, "num_classes": self.num_labels}
        self._run.begin()
        device = next((own.device for own in [*self.parameters(), *self.buffers()]), self.targets.device)
        self._run.apply(lambda tensor: tensor.to(device))  # who moves parameters and buffers alone (FSDP) forgets these
        annotations = as_annotations(annotations, **sizes).to(device).prepare()
        self._row_of = row_table(annotations.item_id)
        self._numbers = ItemNumbers(annotations.vocabulary)
        self._annotations, self._predict = annotations, predict
        return annotations

    @override
    def get_extra_state(self) -> Tensor:
        """The history."""
        return to_tensor(self.history)

    @override
    def set_extra_state(self, state: Tensor) -> None:
        """Takes up the history."""
        self.history = from_tensor(state)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._run.apply(fn)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "targets"] = self.targets
        super()._save_to_state_dict(destination, prefix, keep_vars)
        history = destination.pop(prefix + "_extra_state")
        destination |= {prefix + name: self._run[name] for name in self.stored} | {prefix + "_extra_state": history}

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any,
        errors: list[str],
    ) -> None:  # fmt: skip
        self._run.begin()
        found: dict[str, Tensor] = {}
        for name in self.stored:
            given, own = state_dict.get(prefix + name), self._run[name]
            if given is None:
                missing += [prefix + name] * strict
                continue
            lengths = (*own.shape[1:], *given.shape[1:])  # 0: features whose length is not known yet
            if given.dim() == own.dim() and (given.shape[1:] == own.shape[1:] or 0 in lengths):
                found[name] = given
            else:
                sizes = f"{list(given.shape)} in the state, {list(own.shape)} here"
                errors.append(f"size mismatch for {prefix}{name}: {sizes}")
        rest = {key: value for key, value in state_dict.items() if key not in {prefix + name for name in self.stored}}
        super()._load_from_state_dict(rest, prefix, metadata, strict, missing, unexpected, errors)
        with torch.no_grad():
            for name, given in found.items():
                own = self._run[name]
                kept = own if own.shape == given.shape else own.new_empty(given.shape)
                self._run[name] = kept.copy_(given)
        self._loaded = len(found.get("targets", ())) > 0

    def __getstate__(self) -> dict[str, Any]:
        """Without the run: a copy (a pickle) has the targets, and is given its training set anew."""
        return {**self.__dict__, "_annotations": None, "_predict": None}
