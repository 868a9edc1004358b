"""Cross-fitted EM on the backbone's features first, then a network on its posteriors."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from crowdnal._utils.options import check_integer
from crowdnal.aggregation import feature_em
from crowdnal.aggregation.em import Prior
from crowdnal.data import Annotations
from crowdnal.objectives._bases.aggregate_first import AggregateFirst
from crowdnal.objectives._bases.closed_form import BeforehandOptions
from crowdnal.objectives._bases.history import Round
from crowdnal.objectives._bases.rounds import CALL
from crowdnal.objectives._registry import register


@register(
    "feature-em",
    link="EM whose prior never saw an item's own labels, then cross-entropy",
    source="crowdnal (docs/robust)",
)
class FeatureEM(AggregateFirst):
    """Cross-entropy against the posteriors of :func:`crowdnal.feature_em`, found once before training.

    They come of the features that the classifier has when training begins, such as those of a pretrained backbone,
    and of the annotations; where the features say nothing they are those of :func:`crowdnal.dawid_skene`. Needs
    ``on_train_start(annotations, predict)``, whose predictions bring the features.

    Args:
        folds: of the cross-fitting, 2 or more.
        rounds: of EM, 1 or more.
    """

    needs_features = True

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        folds: int = 5, rounds: int = 8, soft: bool = True, confusion_prior: Prior = "crowd",
        **known: Unpack[BeforehandOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, soft=soft, confusion_prior=confusion_prior, **known)
        check_integer(2, folds=folds)
        check_integer(1, rounds=rounds)
        if self.initial is not None:
            raise ValueError("initial_confusion is not used by FeatureEM, which starts from the votes: leave it out")
        self.folds, self.rounds = folds, rounds

    def _aggregate(self, annotations: Annotations) -> Tensor:
        features = None if self._predict is None else self._predict()[1]
        if features is None:
            raise RuntimeError(f"FeatureEM needs the features of all items: {CALL}")
        found = feature_em(
            features.float(),
            annotations.to(features.device),
            confusion_prior=self._prior_of(annotations),
            gold=self.gold,
            folds=self.folds,
            rounds=self.rounds,
        )
        self._hold(found.pseudo_counts)
        self.history = [Round(n + 1, 0, value) for n, value in enumerate(found.log_likelihood)]
        return found.posterior
