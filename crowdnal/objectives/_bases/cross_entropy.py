"""What a label counts in a cross-entropy: class weights, label smoothing, focal terms.

The terms of a label (or of the target of an item) are ``c[k] t[k] (1 - p[k])^γ (-log p[k])``: c class weights, t the
label, smoothed, γ focal. Means are divided by the class weights of the labels, unsmoothed, as
`torch.nn.functional.cross_entropy` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from crowdnal._utils.options import check_amount
from crowdnal.data import Annotations
from crowdnal.functional import Reduction
from crowdnal.objectives._bases.targets import reduce_items

ClassWeight = Tensor | Sequence[float]
Target = Literal["labels", "targets"] | None
"""What a cross-entropy is with: each label, a target by item; None: there is no cross-entropy."""


class CrossEntropyOptions(TypedDict, total=False):
    """What may be said of every cross-entropy."""

    class_weight: ClassWeight | None
    label_smoothing: float
    focal: float


NAMES = tuple(CrossEntropyOptions.__annotations__)


class CrossEntropy(NamedTuple):
    """Those options, checked.

    Attributes:
        class_weight: ``[K]`` or None.
        label_smoothing: ε.
        focal: γ.
    """

    class_weight: Tensor | None
    label_smoothing: float
    focal: float

    @property
    def plain(self) -> bool:
        """Whether a label's term is its negative log-probability (times its class weight)."""
        return self.label_smoothing == 0 and self.focal == 0

    def of_classes(self, num_classes: int, dtype: torch.dtype) -> Tensor | None:
        """Weights ``[C]`` of true classes, None where there are none or the labels are too few to tell."""
        if self.class_weight is None or len(self.class_weight) < num_classes:
            return None
        return self.class_weight[:num_classes].to(dtype)

    def by_label(self, annotations: Annotations) -> Annotations:
        """The annotations with their weights times those of their labels."""
        if self.class_weight is None:
            return annotations
        factor = self.class_weight[annotations.label]
        weight = factor if annotations.weight is None else annotations.weight * factor
        return Annotations.trusted(annotations.fields._replace(weight=weight))

    def of_labels(self, log_probs: Tensor, label: Tensor) -> Tensor:
        """``[nnz]`` terms of labels, without the weight of :meth:`by_label`, of log-probabilities ``[nnz, K]``."""
        terms, size = self.focused(log_probs), log_probs.shape[1]
        others = terms
        if self.class_weight is not None:
            weight = self.class_weight.to(terms.dtype)
            own = weight[label].unsqueeze(1)
            others = terms * (weight / own.where(own > 0, 1.0))
        own_term = terms.gather(1, label.unsqueeze(1)).squeeze(1)
        return (1 - self.label_smoothing) * own_term + self.label_smoothing / size * others.sum(1)

    def of_targets(self, logits: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
        """``-Σ_k targets[k] log p[k]``, averaged over the items whose targets are not all zero.

        Args:
            logits: ``[B, C]``.
            targets: ``[B, C]`` not negative; all zero where an item does not count, whatever its logits are.
            reduction: ``"mean"`` or (the same) ``"item_mean"``, ``"per_item"``, ``"sum"``, or ``"none"``: ``[B]``.
        """
        return reduce_items(self.terms_of(logits, targets), self.units_of(targets), reduction)

    def terms_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """``[B]`` of :meth:`of_targets`, not reduced."""
        weighted = self.smoothed(targets)
        # where, not a product: an item that does not count must give exactly 0 even if its logits are not finite
        if self.focal == 0:
            return -(weighted * logits.log_softmax(-1)).where(weighted > 0, 0.0).sum(-1)
        return (weighted * self.focused(logits.log_softmax(-1).where(weighted > 0, 0.0))).sum(-1)

    def units_of(self, targets: Tensor) -> Tensor:
        """``[B]`` what an item counts in a mean: whether its targets are not all zero, or their mean class weight."""
        counted = (targets > 0).any(-1)
        weight = self.of_classes(targets.shape[1], targets.dtype)
        if weight is None:
            return counted
        return (targets * weight).sum(-1) / targets.sum(-1).where(counted, 1.0)

    def smoothed(self, targets: Tensor) -> Tensor:
        """Targets, smoothed, times class weights."""
        if self.label_smoothing > 0:
            even = targets.sum(-1, keepdim=True) / targets.shape[1]
            targets = (1 - self.label_smoothing) * targets + self.label_smoothing * even
        weight = self.of_classes(targets.shape[1], targets.dtype)
        return targets if weight is None else targets * weight

    def focused(self, log_p: Tensor) -> Tensor:
        """``(1 - p)^γ (-log p)`` of each log-probability."""
        if self.focal == 0:
            return -log_p
        wrong = -log_p.expm1()
        some = wrong > 0  # at p = 1 the slope of (1 - p)^γ may be infinite, that of the term is 0
        return wrong.where(some, 1.0).pow(self.focal) * -log_p.where(some, 0.0)


def checked_class_weight(weight: ClassWeight | None, **sizes: int) -> Tensor | None:
    """A copy of the weights, as many as the one size that is given says.

    Raises:
        ValueError: they are not, or are negative, not finite, or all 0.
    """
    if weight is None:
        return None
    ((name, size),) = sizes.items()
    of = f"{name}={size}"
    try:
        found = torch.as_tensor(weight).detach().to(torch.get_default_dtype())
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"class_weight={weight!r} must be numbers, one for each of {of}") from None
    if found.shape != (size,):
        raise ValueError(f"class_weight has shape {list(found.shape)} but must have one number for each of {of}")
    bad = ~(found.isfinite() & (found >= 0))
    if bool(bad.any()) or not bool((found > 0).any()):
        k = int(bad.nonzero()[0, 0]) if bool(bad.any()) else 0
        raise ValueError(
            f"class_weight[{k}]={found[k].item():g} must be finite and 0 or more, and one of them above 0: what a "
            "label of that class counts"
        )
    return found.clone()


def check_shape_of_terms(label_smoothing: float, focal: float) -> None:
    """A ValueError for what is no ε in [0, 1) or γ of 0 or more."""
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing!r} must be at least 0 and below 1")
    check_amount("the power of 1 - p", focal=focal)
