"""Weighted DoctorNet: Guan et al., Who Said What: Modeling Individual Labelers Improves Classification, AAAI 2018."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from crowdnal.data import Annotations
from crowdnal.functional import Reduction
from crowdnal.functional.reduction import reduce
from crowdnal.objectives.doctor_net import DoctorNet, Heads, nothing


class WeightedDoctorNet(DoctorNet):
    """:class:`DoctorNet`, then weights for averaging its heads, learnt with everything else frozen (WDN).

    From epoch ``head_epochs`` on the loss is the cross-entropy of each label against the weighted mean of all heads;
    only the weights (a softmax over annotators, equal before) have a gradient, so that optimizers leave the rest alone
    where ``zero_grad`` sets gradients to None (its default; DistributedDataParallel needs
    ``find_unused_parameters=True`` then). ``reduction="item_mean"`` is cross-entropy with an item's mean vote.
    ``log_likelihood`` is the weighted mean's own log-probability of each label. Needs ``on_epoch_start(epoch)``.

    Args:
        head_epochs: epochs that train the heads, 0 or more; give the run more than these.
    """

    name: ClassVar[str] = "weighted-doctor-net"

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        num_labels: int | None = None,
        reduction: Reduction = "mean",
        feature_dim: int | None = None,
        heads: Heads = "separate",
        head_epochs: int = 15,
    ) -> None:
        super().__init__(
            num_classes,
            num_annotators,
            num_labels=num_labels,
            reduction=reduction,
            feature_dim=feature_dim,
            heads=heads,
        )
        if isinstance(head_epochs, bool) or not isinstance(head_epochs, int) or head_epochs < 0:
            raise ValueError(f"head_epochs={head_epochs!r} must be an integer, 0 or more")
        self.head_epochs = head_epochs
        self.averaging = nn.Parameter(torch.zeros(num_annotators))
        self._averages: bool | None = None

    def on_epoch_start(self, epoch: int) -> None:
        """Tells heads from averaging."""
        self._averages = epoch >= self.head_epochs

    def averaging_weights(self) -> Tensor:
        """``[R]``, detached, sum 1."""
        return self.averaging.detach().float().softmax(0)

    def _log_weights(self) -> Tensor:
        return self.averaging.log_softmax(0)

    def _loss(self, logits: Tensor, annotations: Annotations, features: Tensor | None) -> Tensor:
        if self._averages is None and self.training:
            raise RuntimeError(
                "WeightedDoctorNet needs to know the epoch: call objective.on_epoch_start(epoch) before every epoch"
            )
        if not self._averages:
            return super()._loss(logits, annotations, features) + nothing(self.averaging).to(logits.dtype)
        nll = -self._log_average_of_labels(logits, annotations, features)
        return reduce(nll, annotations, annotations.weight, self.reduction)

    def _log_likelihood(self, logits: Tensor, annotations: Annotations, features: Tensor | None) -> Tensor:
        return self._log_average_of_labels(logits, annotations, features)

    def _log_average_of_labels(self, logits: Tensor, annotations: Annotations, features: Tensor | None) -> Tensor:
        features = None if features is None else features.detach()
        average = self._log_average(logits.detach(), features, self._heads().detach(), self._log_weights())
        return average[annotations.item, annotations.label]

    def extra_repr(self) -> str:
        """What ``print(objective)`` adds."""
        return f"{super().extra_repr()}, head_epochs={self.head_epochs}"
