"""CrowdLayer: Rodrigues & Pereira, Deep Learning from Crowds, AAAI 2018 (DL-CL)."""

from __future__ import annotations

from typing import Literal, Unpack

from crowdnal._utils.options import check_choice
from crowdnal.confusion import FreeConfusion, LowRankConfusion, VectorConfusion
from crowdnal.objectives._bases.confusions import ConfusionOptions, SoftmaxObjective
from crowdnal.objectives._registry import register

Variant = Literal["MW", "VW", "VB", "VW+B"]


@register("crowd-layer", link="softmax(p W_r)", source="Rodrigues & Pereira 2018")
class CrowdLayer(SoftmaxObjective):
    """Cross-entropy of each label against softmax(h), h = the class probabilities p mapped by its annotator.

    ======== ======================= ==============================
    variant  h                       init
    ======== ======================= ==============================
    MW       ``p W_r``               identity (rectangular if K≠C)
    VW       ``p * v_r``             ones
    VB       ``p + b_r``             zeros
    VW+B     ``p * v_r + b_r``       ones, zeros
    ======== ======================= ==============================

    With a ``confusion_prior`` (MW) W_r is what an annotator deviates from the prior's mean π and begins at 0:
    ``h = log(p π) + p W_r``. None is the paper's.

    Where the paper and its released code differ from this: they average over all B·R cells of the label
    matrix, where a missing label counts as loss 0, so the loss is scaled by the density of the matrix. Here
    ``reduction="mean"`` averages over the observed annotations. The published numbers used the former;
    ``"sum"`` divided by B·R gives it. CCC's formulas divide by the items alone: ``"per_item"``. Under Adam these
    differ little, under SGD by a factor in the learning rate.

    Args:
        variant: see above; with a ``rank`` MW.
        sparse_grad: sparse gradients for W (variant MW, full rank), as
            :func:`crowdnal.functional.crowd_cross_entropy` does; for `torch.optim.SparseAdam` or SGD.
    """

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        variant: Variant = "MW", sparse_grad: bool = False, **common: Unpack[ConfusionOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, **common)
        check_choice(Variant, variant=variant)
        if variant != "MW" and (sparse_grad or self.rank is not None):
            option = "sparse_grad=True" if sparse_grad else f"rank={self.rank}"
            raise ValueError(f"{option} is for variant='MW': {variant} has no matrices")
        self.variant: Variant = variant
        self.sparse_grad = sparse_grad
        self.annotators: FreeConfusion | LowRankConfusion | VectorConfusion
        if variant == "MW":
            self.annotators = self.free_matrices(sparse_grad=sparse_grad)
        else:
            self.require_square(f"CrowdLayer(variant={variant!r})")
            self.drop_prior()
            self.annotators = VectorConfusion(
                self.num_matrices, num_classes, scale=variant != "VB", bias=variant != "VW"
            )
