"""DL-DS: Dawid-Skene first, then a network on its posteriors; the baseline of Mena & Ñanculef 2019 and others."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from crowdnal._utils.options import check_integer
from crowdnal.aggregation import dawid_skene
from crowdnal.aggregation import one_coin as one_coin_dawid_skene
from crowdnal.aggregation.em import Prior
from crowdnal.data import Annotations
from crowdnal.objectives._bases.aggregate_first import AggregateFirst
from crowdnal.objectives._bases.closed_form import BeforehandOptions
from crowdnal.objectives._bases.history import Round
from crowdnal.objectives._registry import register


@register("dl-ds", link="Dawid-Skene first, then cross-entropy", source="Dawid & Skene 1979")
class DLDS(AggregateFirst):
    """Cross-entropy against the posteriors of :func:`crowdnal.dawid_skene`, found once before training.

    ``history`` has a round for every iteration. The confusions are those of Dawid-Skene (of the full model in either
    case: with ``one_coin`` they are counted against the one-coin posteriors). Needs ``on_train_start(annotations)``.

    Args:
        one_coin: one number per annotator instead of a confusion, :func:`crowdnal.one_coin`, for few labels each.
        max_iterations: of Dawid-Skene.
        smoothing: pseudo-count added to every cell of every confusion (one-coin: to right and wrong labels).
    """

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        one_coin: bool = False, soft: bool = True, max_iterations: int = 100, smoothing: float = 0.0,
        confusion_prior: Prior = "crowd", **known: Unpack[BeforehandOptions],
    ) -> None:  # fmt: skip
        super().__init__(
            num_classes, num_annotators, soft=soft, smoothing=smoothing,
            confusion_prior=None if one_coin and isinstance(confusion_prior, str) else confusion_prior, **known,
        )  # fmt: skip
        check_integer(1, max_iterations=max_iterations)
        if one_coin and (self.initial is not None or self.confusion_prior is not None):
            raise ValueError("one_coin=True has no confusions: leave out initial_confusion and confusion_prior")
        self.one_coin = one_coin
        self.max_iterations = max_iterations

    def _aggregate(self, annotations: Annotations) -> Tensor:
        iterations, smoothing, gold = self.max_iterations, self.smoothing, self.gold
        if self.one_coin:
            found = one_coin_dawid_skene(annotations, max_iterations=iterations, smoothing=smoothing, gold=gold)
        else:
            initial = None if self.initial is None else self.initial.double().exp().transpose(1, 2)
            found = dawid_skene(
                annotations,
                max_iterations=iterations,
                smoothing=smoothing,
                gold=gold,
                initial_confusion=initial,
                confusion_prior=self._prior_of(annotations),
            )
            self._hold(found.pseudo_counts)
        self.history = [Round(n + 1, 0, value) for n, value in enumerate(found.log_likelihood)]
        return found.posterior
