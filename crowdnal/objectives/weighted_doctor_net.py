"""Weighted DoctorNet: Guan et al., Who Said What: Modeling Individual Labelers Improves Classification, AAAI 2018."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from crowdnal._utils.options import check_integer
from crowdnal.functional.reduction import reduce
from crowdnal.objectives._bases.batch import Batch
from crowdnal.objectives._registry import register
from crowdnal.objectives.doctor_net import DoctorNet, DoctorNetOptions, nothing


@register("weighted-doctor-net", link="doctor-net, averaging weights learnt afterwards", source="Guan et al. 2018")
class WeightedDoctorNet(DoctorNet):
    """:class:`DoctorNet`, then weights for averaging its heads, learnt with everything else frozen (WDN).

    To the loss of the heads is added the cross-entropy of each label against their weighted mean, of which only the
    weights have a gradient: they follow the heads as these are trained. The paper trains the heads first
    (``head_epochs``), which leaves those of a short run half trained: from epoch ``head_epochs`` on the loss is that
    cross-entropy; only the weights (a softmax over annotators, equal before) have a gradient, so that optimizers leave
    the rest alone where ``zero_grad`` sets gradients to None (its default; DistributedDataParallel needs
    ``find_unused_parameters=True`` then). ``reduction="item_mean"`` is cross-entropy with an item's mean vote.
    ``log_likelihood`` is the weighted mean's own log-probability of each label. Needs ``on_epoch_start(epoch)`` then.

    Args:
        head_epochs: epochs that train the heads alone, 0 or more; give the run more than these. None: all.
    """

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        head_epochs: int | None = None,
        **common: Unpack[DoctorNetOptions],
    ) -> None:
        super().__init__(num_classes, num_annotators, **common)
        if head_epochs is not None:
            check_integer(0, head_epochs=head_epochs)
        self.head_epochs = head_epochs
        self.averaging = nn.Parameter(torch.zeros(num_annotators))
        self._averages: bool | None = None

    @override
    def on_epoch_start(self, epoch: int) -> None:
        self._averages = None if self.head_epochs is None else epoch >= self.head_epochs

    def averaging_weights(self) -> Tensor:
        """``[R]``, detached, sum 1."""
        return self.averaging.detach().float().softmax(0)

    def _log_weights(self) -> Tensor:
        return self.averaging.log_softmax(0)

    def _loss(self, batch: Batch) -> Tensor:
        if self.head_epochs is None:
            loss = super()._loss(batch)
            if batch.reduction == "none":
                return loss + nothing(self.averaging).to(batch.logits.dtype)
            return loss + self._of_average(batch)
        if self._averages is None and self.training:
            raise RuntimeError(
                "WeightedDoctorNet needs to know the epoch: call objective.on_epoch_start(epoch) before every epoch"
            )
        loss = super()._loss(batch)
        return loss if self._averages else loss + nothing(self.averaging).to(batch.logits.dtype)

    def _nll(self, batch: Batch) -> Tensor:
        if not self._averages:
            return super()._nll(batch)
        return self._of_average(batch)

    def _of_average(self, batch: Batch) -> Tensor:
        return reduce(-self._log_likelihood(batch), batch.annotations, batch.weight, batch.reduction)

    def _label_log_probs(self, batch: Batch) -> Tensor:
        return self._averaged(batch)[batch.annotations.item] if self._averages else super()._label_log_probs(batch)

    def _log_likelihood(self, batch: Batch) -> Tensor:
        return self._averaged(batch)[batch.annotations.item, batch.annotations.label]

    def _averaged(self, batch: Batch) -> Tensor:
        """Log of the weighted mean of the heads' probabilities, ``[B, C]``, differentiable for the weights alone."""
        features = None if batch.features is None else batch.features.detach()
        return self._log_average(batch.logits.detach(), features, self._heads().detach(), self._log_weights())
