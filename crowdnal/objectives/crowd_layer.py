"""CrowdLayer: Rodrigues & Pereira, Deep Learning from Crowds, AAAI 2018 (DL-CL)."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from torch import Tensor

from crowdnal.confusion import FreeConfusion, LowRankConfusion, VectorConfusion
from crowdnal.data import Annotations
from crowdnal.functional import Reduction
from crowdnal.objectives._bases.confusions import ConfusionObjective, Groups

Variant = Literal["MW", "VW", "VB", "VW+B"]


class CrowdLayer(ConfusionObjective):
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
        groups: ``[R]`` the group of each annotator, 0 to G-1; its members share the matrix (or vectors). Not in the
            paper.
        rank: variant MW with ``W_r = diag(d_r) + U_r V_r`` of this rank (1 to min(C, K)), so that a thousand classes
            and thousands of annotators fit; :class:`crowdnal.confusion.LowRankConfusion`. Not in the paper.
            ``confusion()`` still builds ``[R, C, K]``; the loss, ``reliability()`` and ``posterior()`` do not.
        sparse_grad: sparse gradients for W (variant MW, full rank), as
            :func:`crowdnal.functional.crowd_cross_entropy` does; for `torch.optim.SparseAdam` or SGD.
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
        groups: Groups | None = None,
        rank: int | None = None,
        sparse_grad: bool = False,
    ) -> None:
        super().__init__(
            num_classes, num_annotators, num_labels=num_labels, reduction=reduction, groups=groups, rank=rank
        )
        if variant not in get_args(Variant):
            raise ValueError(f"variant={variant!r} is unknown: use one of {', '.join(get_args(Variant))}")
        if sparse_grad and (variant != "MW" or rank is not None):
            raise ValueError(f"sparse_grad=True is for variant='MW' with rank=None, not for {variant} with rank={rank}")
        if rank is not None and variant != "MW":
            raise ValueError(f"rank={rank} is for variant='MW': {variant} has no matrices")
        self.variant: Variant = variant
        self.sparse_grad = sparse_grad
        self.annotators: FreeConfusion | LowRankConfusion | VectorConfusion
        if rank is not None:
            self.annotators = LowRankConfusion(self.num_matrices, num_classes, self.num_labels, rank=rank)
        elif variant == "MW":
            self.annotators = FreeConfusion(self.num_matrices, num_classes, self.num_labels, sparse_grad=sparse_grad)
        else:
            self._needs_square(f"CrowdLayer(variant={variant!r})")
            self.annotators = VectorConfusion(
                self.num_matrices, num_classes, scale=variant != "VB", bias=variant != "VW"
            )

    def confusion(self) -> Tensor:
        """``[R, C, K]``: softmax of h for a classifier that is certain of class k."""
        return super().confusion()

    def _nll(
        self,
        logits: Tensor,
        annotations: Annotations,
        features: Tensor | None,
        weight: Tensor | None,
        reduction: Reduction,
    ) -> Tensor:
        return self.annotators.nll(logits.softmax(-1), self._by_matrix(annotations), weight, reduction)

    def extra_repr(self) -> str:
        """What ``print(objective)`` adds."""
        return f"{super().extra_repr()}, variant={self.variant!r}"
