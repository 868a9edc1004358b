"""DoctorNet: Guan et al., Who Said What: Modeling Individual Labelers Improves Classification, AAAI 2018."""

from __future__ import annotations

import math
from typing import Literal, Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from crowdnal._utils.options import check_choice, check_integer
from crowdnal.aggregation import dawid_skene
from crowdnal.data import Annotations
from crowdnal.functional import crowd_cross_entropy
from crowdnal.functional.segments import gather_rows, index_of, labels_given, mix_indexed
from crowdnal.objectives._bases.base import Objective, ObjectiveOptions, Predict
from crowdnal.objectives._bases.batch import Batch
from crowdnal.objectives._bases.blocks import logsumexp_in_blocks
from crowdnal.objectives._registry import register

Heads = Literal["pooled", "residual", "separate"]

_BLOCK = 4096  # scores (annotators times labels) of an item that are there at a time
_ITEMS = 4096  # items of which they are


class DoctorNetOptions(ObjectiveOptions, total=False):
    """Those of :class:`DoctorNet`."""

    feature_dim: int | None
    heads: Heads


@register("doctor-net", link="a head per annotator on shared features, predictions averaged", source="Guan et al. 2018")
class DoctorNet(Objective):
    """Cross-entropy of each label against its annotator's own softmax head on shared features; predict their mean.

    Every annotator counts the same in the mean, however much they label. Training costs one head per annotation;
    predicting one per annotator and item, in blocks. The prediction is not the classifier's:
    :meth:`predict` makes it from features, and ``CrowdModel(images)`` and ``crowdnal train`` use it. The heads do not
    model confusions.

    Args:
        feature_dim: D, length of the features; None: ``crowdnal.attach`` and ``crowdnal train`` find it.
        heads: ``"separate"`` (the paper): linear layers, drawn as `torch.nn.Linear` is. The classifier's own last
            layer is then neither used nor trained. ``"residual"``: what a head adds to the classifier's logits,
            initialised to 0. The same heads can be reached, the classifier learns what they share, and without the
            objective the backbone is a classifier still. ``"pooled"``: residual ones, of which n / (n + s (D + 1))
            counts where their annotator gave n labels: with few, all have the classifier. s is how many labels of each
            class the crowd's confusion counts for in that of everyone (:func:`crowdnal.dawid_skene`), found by
            ``on_train_start(annotations)``, without which all counts.
    """

    needs_features = True
    models_annotators = False
    labels: Tensor
    strength: Tensor

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        feature_dim: int | None = None, heads: Heads = "pooled", **common: Unpack[ObjectiveOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, **common)
        self.require_square(type(self).__name__)
        check_choice(Heads, heads=heads)
        self.heads: Heads = heads
        self.register_buffer("labels", torch.zeros(num_annotators) if heads == "pooled" else None)
        self.register_buffer("strength", torch.zeros(()) if heads == "pooled" else None)
        self.feature_dim: int | None = None
        self.weight: nn.Parameter | None
        self.register_parameter("weight", None)
        if feature_dim is not None:
            self.set_feature_dim(feature_dim)

    @override
    def on_train_start(self, annotations: Annotations | None = None, predict: Predict | None = None) -> None:
        """Counts whose head can be how much of its own, where heads are pooled and annotations are given."""
        if annotations is None or self.heads != "pooled":
            return
        annotations = annotations.to(self.labels.device)
        prior = dawid_skene(annotations).pseudo_counts
        self.strength.fill_(0.0 if prior is None else float(prior.sum(1).mean()))
        self.labels.copy_(labels_given(annotations))

    @override
    def set_feature_dim(self, feature_dim: int) -> None:
        """Makes the heads: ``weight [R, D + 1, C]``, the last row of each is its bias."""
        check_integer(1, feature_dim=feature_dim)
        if self.feature_dim not in (None, feature_dim):
            raise ValueError(f"the features have length {feature_dim}, but feature_dim={self.feature_dim} was given")
        if self.feature_dim is not None:
            return
        self.feature_dim = feature_dim
        device = next((parameter.device for parameter in self.parameters()), None)
        self.weight = nn.Parameter(torch.empty(self.num_annotators, feature_dim + 1, self.num_classes, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the heads anew."""
        if self.weight is not None and self.feature_dim is not None:
            if self.heads == "separate":
                bound = 1 / math.sqrt(self.feature_dim)
                nn.init.uniform_(self.weight, -bound, bound)
            else:
                nn.init.zeros_(self.weight)

    @override
    def predict(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Log of the mean of the heads' probabilities, ``[B, C]``."""
        with torch.autocast(logits.device.type, enabled=False):
            heads, log_weights = self._heads(), self._log_weights()
            dtype = torch.promote_types(torch.promote_types(logits.dtype, heads.dtype), torch.float32)
            return self._log_average(logits.to(dtype), features, heads, log_weights)

    @override
    def confusion(self) -> Tensor:
        """The heads have none."""
        raise RuntimeError(
            f"{type(self).__name__} does not model confusions: estimate them with "
            "crowdnal.metrics.empirical_confusion(probabilities, annotations)"
        )

    def _log_weights(self) -> Tensor:
        """Log of every head's weight in the mean, ``[R]``."""
        return self._heads().new_full((self.num_annotators,), -math.log(self.num_annotators))

    def _heads(self) -> Tensor:
        if self.weight is None:
            raise ValueError(
                f"{type(self).__name__} does not know the size of the features: give feature_dim=..., or let "
                "crowdnal.attach find it before the optimizer is made"
            )
        if self.heads != "pooled":
            return self.weight
        few = self.strength * self.weight.shape[1]
        share = torch.where(few > 0, self.labels / (self.labels + few).clamp(min=1), 1.0)
        return self.weight * share.to(self.weight.dtype)[:, None, None]

    def _augmented(self, features: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Features with a column of ones, ``[B, D + 1]``."""
        if features is None or features.dim() != 2 or features.shape[1] + 1 != self._heads().shape[1]:
            shape = None if features is None else list(features.shape)
            raise ValueError(f"features is {shape} but the heads were made for [B, feature_dim={self.feature_dim}]")
        return torch.cat([features.to(dtype), features.new_ones(features.shape[0], 1, dtype=dtype)], 1)

    def _log_average(self, logits: Tensor, features: Tensor | None, heads: Tensor, log_weights: Tensor) -> Tensor:
        x = self._augmented(features, logits.dtype)
        if not torch.compiler.is_exporting() and len(logits) > _ITEMS:
            parts = zip(logits.split(_ITEMS), x[:, :-1].split(_ITEMS), strict=True)
            return torch.cat([self._log_average(*part, heads, log_weights) for part in parts])

        def average(heads: Tensor, log_weights: Tensor) -> Tensor:
            scores = torch.einsum("bd,rdk->brk", x, heads)
            scores = scores if self.heads == "separate" else scores + logits.unsqueeze(1)
            return (scores.log_softmax(-1) + log_weights.unsqueeze(1)).logsumexp(1)

        tables = heads.to(logits.dtype), log_weights.to(logits.dtype)
        return logsumexp_in_blocks(average, tables, max(1, _BLOCK // self.num_classes))

    def _nll(self, batch: Batch) -> Tensor:
        (logits, annotations, features, weight, reduction), heads = batch, self._heads()
        x = self._augmented(features, logits.dtype)
        if self.heads != "separate":
            return crowd_cross_entropy(x, heads, annotations, shared=logits, weight=weight, reduction=reduction)
        loss = crowd_cross_entropy(x, heads, annotations, weight=weight, reduction=reduction)
        return loss + nothing(logits)  # the classifier gets a gradient, 0: DistributedDataParallel waits for one

    def _label_log_probs(self, batch: Batch) -> Tensor:
        (logits, annotations, features, _, _), heads = batch, self._heads()
        scores = mix_indexed(self._augmented(features, logits.dtype), heads.to(logits.dtype), index_of(annotations))
        if self.heads != "separate":
            every = torch.arange(len(scores), device=scores.device)
            return (scores + gather_rows(logits, annotations.item, every)).log_softmax(-1)
        return scores.log_softmax(-1) + nothing(logits)

    def _posterior(self, batch: Batch) -> Tensor:
        return self.predict(batch.logits, batch.features).softmax(-1)


def nothing(tensor: Tensor) -> Tensor:
    """0, whose gradient for the tensor is 0 even if values are not finite."""
    return tensor.where(torch.zeros_like(tensor, dtype=torch.bool), 0.0).sum()
