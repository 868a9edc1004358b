"""Both networks of a CCC as one classifier with an objective, for what predicts and measures such."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from crowdnal.ccc.module import CCC
from crowdnal.objectives import Batch, Objective
from crowdnal.training import CrowdModel, attach


def joint(ccc: CCC) -> CrowdModel:
    """Predicts with both networks; its objective measures what they make of annotations, and trains nothing."""
    return attach(BothNetworks(ccc), JointObjective(ccc))


class BothNetworks(nn.Module):
    """Logits ``[B, C]`` of both together, and as features those of each ``[B, 2 C]``."""

    def __init__(self, ccc: CCC) -> None:
        super().__init__()
        self.ccc = ccc

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        each = self.ccc.log_probabilities(images)
        return self.ccc.together(*each), torch.cat(each, 1)


class JointObjective(Objective):
    """What the two CrowdLayers of a CCC say: a label's probability is the mean of both, a confusion too."""

    name, link, source = CCC.name, CCC.link, CCC.source
    needs_features = True

    def __init__(self, ccc: CCC) -> None:
        layer = ccc.model_a.objective
        super().__init__(layer.num_classes, layer.num_annotators)
        self._of = (ccc,)  # whose parameters are the networks', not this one's

    @override
    def confusion(self) -> Tensor:
        """See :meth:`CCC.confusion`."""
        return self._of[0].confusion()

    def _loss(self, batch: Batch) -> Tensor:
        raise NotImplementedError("CCC trains by its own step")

    def _log_likelihood(self, batch: Batch) -> Tensor:
        assert batch.features is not None
        logits = batch.features.to(batch.logits.dtype).chunk(2, 1)
        models = self._of[0].model_a, self._of[0].model_b
        a, b = (
            model.objective.log_likelihood(own, batch.annotations) for model, own in zip(models, logits, strict=True)
        )
        return CCC.together(a, b)

    def _get_name(self) -> str:
        return type(self._of[0]).__name__

    @override
    def extra_repr(self) -> str:
        """Sizes, and what CCC was made with."""
        return f"{super().extra_repr()}, {self._of[0].extra_repr()}"
