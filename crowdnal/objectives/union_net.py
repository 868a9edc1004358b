"""UnionNet: Wei et al., Deep Learning From Multiple Noisy Annotators as A Union, TNNLS 2022."""

from __future__ import annotations

from typing import Literal, Unpack

import torch
from torch import Tensor
from typing_extensions import override

from crowdnal._utils.distributed import assign
from crowdnal._utils.options import check_choice
from crowdnal.confusion import NormalizedConfusion
from crowdnal.data import Annotations
from crowdnal.functional import Reduction, crowd_cross_entropy, crowd_mixture_nll
from crowdnal.functional.reduction import reduce
from crowdnal.functional.segments import index_of, row_products, rows_of_items
from crowdnal.objectives._bases.base import Objective, Predict
from crowdnal.objectives._bases.batch import Batch
from crowdnal.objectives._bases.blocks import logsumexp_in_blocks
from crowdnal.objectives._bases.cross_entropy import CrossEntropyOptions
from crowdnal.objectives._bases.init import Init, log_confusions
from crowdnal.objectives._registry import register

Variant = Literal["A", "B"]

_OFFSET = 1e-5  # inside the log of the initial matrices
_BLOCK = 4096  # columns of the union whose scores are there at a time


@register("union-net", link="one distribution over all pairs of annotator and label", source="Wei et al. 2022")
class UnionNet(Objective):
    """Cross-entropy of an item's labels against one distribution over all R·K pairs of annotator and label.

    One matrix T ``[C, R·K]`` maps the class probabilities p to that union; the target of an item is the normalised
    union of its one-hot labels, hence ``reduction="item_mean"`` by default.

    ======= =================================================== ===================
    variant probability of the pair (r, y)                      cost of a step
    ======= =================================================== ===================
    A       softmax over all R·K of ``p T``                     B·R·C·K
    B       ``p A``, rows of A = softmax over all R·K of T      R·C·K + nnz·C
    ======= =================================================== ===================

    The normalisation over all annotators is the method: every step moves all of T. Nothing of size B·R·K is kept; A
    works through the annotators in blocks, once more in the backward pass; T is full, hence no ``rank``.
    ``log_likelihood`` (given who labels) and ``confusion`` normalise over an annotator's own labels.

    The public code for the paper, which may not be its authors', differs: A sums over an item's labels
    (``reduction="per_item"``). B is what the CCC paper compares with, as the better one of the two.

    Args:
        variant: see above.
        init: ``"crowd"``: ``T_r[k, y] = log(A_r[k, y] + 1e-5)``, A of :func:`crowdnal.dawid_skene`, whose prior is the
            crowd's confusion; ``"votes"`` (the paper; also where K != C): A counted over the training set with an
            item's mean vote for its true class; both set by ``on_train_start(annotations)``; ``"identity"`` (also
            where that is not called): ``T_r = I``, which that code uses on LabelMe (up to 1e-5).
    """

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        variant: Variant = "B", init: Init = "crowd", num_labels: int | None = None,
        reduction: Reduction = "item_mean", **terms: Unpack[CrossEntropyOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, num_labels=num_labels, reduction=reduction, **terms)
        check_choice(Variant, variant=variant)
        check_choice(Init, init=init)
        if init != "identity":
            self.require_a_label_per_class(f"UnionNet(init={init!r})")
        self.variant: Variant = variant
        self.init: Init = init
        self.annotators = NormalizedConfusion(
            num_annotators, num_classes, self.num_labels, normalization="softmax", on=1.0, off=0.0
        )

    @override
    def on_train_start(self, annotations: Annotations | None = None, predict: Predict | None = None) -> None:
        """Sets T from the votes, where asked for and annotations are given."""
        if self.init != "identity" and annotations is not None:
            with torch.no_grad():
                assign(self.annotators.weight, log_confusions(annotations, self.init, _OFFSET, self.num_classes))

    @override
    def confusion(self) -> Tensor:
        """``[R, C, K]``: softmax of the rows of T_r."""
        return self.annotators.probs()

    def _nll(self, batch: Batch) -> Tensor:
        logits, annotations = batch.logits, batch.annotations
        table = self.annotators.weight.to(logits.dtype)
        if self.variant == "B":
            return self._of_pairs(batch, table, table)
        p = logits.softmax(-1)
        total = logsumexp_in_blocks(lambda rows: (p @ rows.T).logsumexp(1), (table.flatten(0, 1),), _BLOCK)
        nll = rows_of_items(total, annotations) - row_products(p, table, index_of(annotations), annotations.label)
        return reduce(nll, annotations, batch.weight, batch.reduction)

    def _of_pairs(self, batch: Batch, table: Tensor, cells: Tensor) -> Tensor:
        """Variant B's negative log-probability of what has the log weights ``cells [R, K, C]``, of those in T."""
        log_probs = batch.logits.log_softmax(-1) - table.flatten(0, 1).logsumexp(0)
        return crowd_mixture_nll(
            log_probs, cells, batch.annotations, normalization="none", weight=batch.weight, reduction=batch.reduction
        )

    def _log_likelihood(self, batch: Batch) -> Tensor:
        batch, table = batch.each(), self.annotators.weight.to(batch.logits.dtype)
        if self.variant == "A":
            p, scores = batch.logits.softmax(-1), table.transpose(1, 2)
            return -crowd_cross_entropy(p, scores, batch.annotations, weight=batch.weight, reduction="none")
        own = table.logsumexp(1, keepdim=True).expand_as(table)  # of all labels of an annotator
        return self._of_pairs(batch, table, own) - self._of_pairs(batch, table, table)
