"""DL-DS: Dawid-Skene first, then a network on its posteriors; the baseline of Mena & Ñanculef 2019 and others."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from crowdnal.aggregation import dawid_skene
from crowdnal.aggregation import one_coin as one_coin_dawid_skene
from crowdnal.functional import Reduction, label_counts
from crowdnal.objectives._bases.counted import CountedObjective
from crowdnal.objectives._bases.history import Round
from crowdnal.objectives._bases.targets import most_probable


class DLDS(CountedObjective):
    """Cross-entropy against the posteriors of :func:`crowdnal.dawid_skene`, found once at the start.

    ``history`` has a round for every iteration. The confusions are those of Dawid-Skene (of the full model in either
    case: with ``one_coin`` they are counted against the one-coin posteriors). Needs ``on_train_start(annotations)``.

    Args:
        one_coin: one number an annotator instead of a confusion, :func:`crowdnal.one_coin`, for few labels each.
        soft: train on the posteriors; otherwise on their most probable class (the first of equals).
        max_iterations: of Dawid-Skene.
        smoothing: pseudo-count added to every cell of every confusion (one-coin: to right and wrong labels).
        gold: ``[N]`` integers, known true classes of the training set, -1 where unknown. They hold throughout.
        initial_confusion: ``[R, C, K]``, **start only** of Dawid-Skene. It alone allows C != K.
        confusion_prior: ``[C, K]`` or ``[R, C, K]`` pseudo-counts, **held** in every M-step.
    """

    name: ClassVar[str] = "dl-ds"

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        num_labels: int | None = None,
        reduction: Reduction = "mean",
        one_coin: bool = False,
        soft: bool = True,
        max_iterations: int = 100,
        smoothing: float = 0.0,
        gold: Tensor | None = None,
        initial_confusion: Tensor | None = None,
        confusion_prior: Tensor | None = None,
    ) -> None:
        super().__init__(
            num_classes,
            num_annotators,
            num_labels=num_labels,
            reduction=reduction,
            smoothing=smoothing,
            gold=gold,
            initial_confusion=initial_confusion,
            confusion_prior=confusion_prior,
        )
        if max_iterations < 1:
            raise ValueError(f"max_iterations={max_iterations!r} must be 1 or more")
        if one_coin and (initial_confusion is not None or confusion_prior is not None):
            raise ValueError("one_coin=True has no confusions: leave out initial_confusion and confusion_prior")
        self.one_coin = one_coin
        self.soft = soft
        self.max_iterations = max_iterations

    def _due(self, epoch: int) -> bool:
        return False

    def _start(self) -> None:
        a = self._annotations
        assert a is not None
        if self.one_coin:
            found = one_coin_dawid_skene(
                a, max_iterations=self.max_iterations, smoothing=self.smoothing, gold=self.gold
            )
        else:
            initial = None if self.initial is None else self.initial.double().exp().transpose(1, 2)
            found = dawid_skene(
                a,
                max_iterations=self.max_iterations,
                smoothing=self.smoothing,
                gold=self.gold,
                initial_confusion=initial,
                confusion_prior=self.confusion_prior,
            )
        self.history = [Round(n + 1, 0, value) for n, value in enumerate(found.log_likelihood)]
        weight = None if a.weight is None else a.weight.double()
        self._count(label_counts(found.posterior, a, weight=weight))
        self._set_targets(found.posterior if self.soft else most_probable(found.posterior))

    def extra_repr(self) -> str:
        """What ``print(objective)`` adds."""
        return f"{super().extra_repr()}, one_coin={self.one_coin}, soft={self.soft}"
