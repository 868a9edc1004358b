"""Soft bootstrapping.

Reed et al., Training Deep Neural Networks on Noisy Labels with Bootstrapping, ICLR workshop 2015.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from crowdnal.objectives._bases.base import ObjectiveOptions
from crowdnal.objectives._bases.batch import Batch
from crowdnal.objectives._bases.targets import reduce_items
from crowdnal.objectives._registry import register
from crowdnal.objectives.majority import MajorityVote


@register("soft-bootstrap", link="cross-entropy with the votes and p itself", source="Reed et al. 2015")
class SoftBootstrap(MajorityVote):
    """Cross-entropy against ``beta`` times the vote plus ``1 - beta`` times the classifier's own probabilities.

    The gradient goes through both, so that the loss is ``beta · CE(vote, p) + (1 - beta) · H(p)``: as the paper says,
    entropy is minimised beside a lighter vote. The paper knows one label per item; here it is the majority vote, with
    which Tanno et al. (2019) compare at 0.95, or the distribution of the votes. Everything else is as in
    :class:`MajorityVote`; items without labels give 0. Class weights are of the vote (an item's p counts their
    mean), and so is smoothing; focal terms are of the whole target.

    Args:
        beta: weight of the vote, in (0, 1]; 1 is :class:`MajorityVote`. The paper and the comparison use 0.95.
        soft: the vote as a distribution, or its winner.
    """

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        beta: float = 0.95, soft: bool = False, **common: Unpack[ObjectiveOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, soft=soft, **common)
        if not 0 < beta <= 1:
            raise ValueError(f"beta={beta!r} must be above 0 and at most 1: the weight of the vote in the target")
        self.beta = beta

    def _loss(self, batch: Batch) -> Tensor:
        vote = self.targets(batch.annotations, batch.logits.dtype)
        log_p = batch.logits.log_softmax(-1)
        weighing = self.cross_entropy
        units = weighing.units_of(vote)
        targets = self.beta * weighing.smoothed(vote) + (1 - self.beta) * units.unsqueeze(1) * log_p.exp()
        # a class of probability 0 adds nothing to the entropy, though its log may be infinite
        some = (vote > 0).any(-1, keepdim=True) & (targets > 0)
        loss = (targets * weighing.focused(log_p.where(some, 0.0))).where(some, 0.0).sum(-1)
        return reduce_items(loss, units, batch.reduction)
