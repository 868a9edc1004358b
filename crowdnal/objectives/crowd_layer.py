"""CrowdLayer: Rodrigues & Pereira, Deep Learning from Crowds, AAAI 2018 (DL-CL)."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from torch import Tensor
from torch.nn import functional as F

from crowdnal.annotations import Annotations
from crowdnal.confusion import FreeConfusion, VectorConfusion
from crowdnal.functional import Reduction, crowd_cross_entropy
from crowdnal.functional._reduction import reduce
from crowdnal.objectives.base import Objective

Variant = Literal["MW", "VW", "VB", "VW+B"]


class CrowdLayer(Objective):
    """Cross-entropy of each label against softmax(h), h = the class probabilities p mapped by its annotator.

    ======== ======================= ==============================
    variant  h                       start
    ======== ======================= ==============================
    MW       ``p W_r``               identity (rectangular if K≠C)
    VW       ``p * v_r``             ones
    VB       ``p + b_r``             zeros
    VW+B     ``p * v_r + b_r``       ones, zeros
    ======== ======================= ==============================

    Where the paper and its released code differ from this: they average over all B·R cells of the label
    matrix, where a missing label counts as loss 0, so the loss is scaled by the density of the matrix. Here
    ``reduction="mean"`` averages over the observed annotations. The published numbers used the former;
    ``"sum"`` divided by B·R gives it. Under Adam the two differ little, under SGD by a factor in the learning
    rate.

    Args:
        variant: see above.
        sparse_grad: sparse gradients for W (variant MW), as :func:`crowdnal.functional.crowd_cross_entropy` does; for
            `torch.optim.SparseAdam` or SGD.
    """

    name: ClassVar[str] = "crowd-layer"

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        num_labels: int | None = None,
        reduction: Reduction = "mean",
        variant: Variant = "MW",
        sparse_grad: bool = False,
    ) -> None:
        super().__init__(num_classes, num_annotators, num_labels=num_labels, reduction=reduction)
        if variant not in get_args(Variant):
            raise ValueError(f"variant={variant!r} is unknown: use one of {', '.join(get_args(Variant))}")
        if sparse_grad and variant != "MW":
            raise ValueError(f"sparse_grad=True is for variant='MW': {variant} has no matrices")
        self.variant: Variant = variant
        self.sparse_grad = sparse_grad
        self.annotators: FreeConfusion | VectorConfusion
        if variant == "MW":
            self.annotators = FreeConfusion(num_annotators, num_classes, self.num_labels)
        else:
            self._needs_square(f"CrowdLayer(variant={variant!r})")
            self.annotators = VectorConfusion(
                num_annotators, num_classes, scale=variant != "VB", bias=variant != "VW"
            )

    def confusion(self) -> Tensor:
        """``[R, C, K]``: softmax of h for a classifier that is certain of class k."""
        return self.annotators.probs()

    def _nll(
        self,
        logits: Tensor,
        annotations: Annotations,
        features: Tensor | None,
        weight: Tensor | None,
        reduction: Reduction,
    ) -> Tensor:
        p = logits.softmax(-1)
        if isinstance(self.annotators, FreeConfusion):
            return crowd_cross_entropy(
                p,
                self.annotators.weight,
                annotations,
                weight=weight,
                reduction=reduction,
                sparse_grad=self.sparse_grad,
            )
        loss = F.cross_entropy(self.annotators.scores(p, annotations), annotations.label, reduction="none")
        return reduce(loss, annotations, weight, reduction)

    def extra_repr(self) -> str:
        """What ``print(objective)`` adds."""
        return f"{super().extra_repr()}, variant={self.variant!r}"
