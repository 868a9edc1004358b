"""Max-MIG: Cao et al., Max-MIG: an Information Theoretic Approach for Joint Learning from Crowds, ICLR 2019."""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from crowdnal._utils.distributed import assign
from crowdnal._utils.options import check_choice
from crowdnal.confusion import NormalizedConfusion
from crowdnal.data import Annotations
from crowdnal.functional import crowd_posterior, label_log_likelihood
from crowdnal.objectives._bases.base import Objective, Predict, SizeOptions
from crowdnal.objectives._bases.batch import Batch
from crowdnal.objectives._bases.init import ClassPrior, Init, log_class_prior, log_confusions
from crowdnal.objectives._bases.targets import reduce_items
from crowdnal.objectives._registry import register


@register("max-mig", link="mutual information of classifier and label aggregator, maximised", source="Cao et al. 2019")
class MaxMIG(Objective):
    """Mutual information between the classifier's and an aggregator's guess of the true class, maximised (KL form).

    The aggregator guesses from the labels alone, ``g = softmax(log prior + Σ_n W_r[y_n])``, with free matrices in the
    place of log confusions. With ``m_ij = Σ_k h_i[k] g_j[k] / prior[k]``, h the classifier's probabilities, the loss
    is ``-mean_i (1 + log m_ii) + mean_{i≠j} m_ij`` over the batch's items that have labels. Common mistakes of
    annotators are no information about the classifier's input, so that it need not follow them.

    The unit is the item: ``"mean"`` (``"item_mean"`` and ``"per_item"`` are the same), ``"sum"``, ``"none"`` ``[B]``
    (0 without labels). An item alone in its batch has no second term. Under several processes pairs are formed within
    each one's batch. ``posterior`` is the paper's aggregated forecaster, ``∝ h g / prior``. Labels only determine W up
    to a constant for each (annotator, label); the shown confusion, a softmax of W's rows as in the authors' code, takes
    that of the init.

    Where the authors' code differs: it adds random noise below 1e-4 inside the log; here all is in the log domain.
    The published numbers have ``class_prior="uniform"``, fixed, and ``init="votes"`` with ``offset=1e-2`` (LabelMe) or
    1e-4 (CIFAR-10); counted against the votes, the matrices of who gave few labels of a class say what they did not do.

    Args:
        init: ``"crowd"``: ``W_r[k, y] = log(A_r[k, y] + offset)``, A of :func:`crowdnal.dawid_skene`, whose prior is
            the crowd's confusion; ``"votes"`` (also where K != C): A counted over the training set with an item's mean
            vote for its true class; both set by ``on_train_start(annotations)``; ``"identity"`` (also where that is
            not called): ``2 I``.
        offset: above 0, see ``init``.
        class_prior: the distribution in the training set, of the classes that the same method finds (``"crowd"``) or
            of the ``"votes"``, set by ``on_train_start``; or the paper's ``"uniform"``, with which uneven classes are
            lost.
        learn_class_prior: train it too.
    """

    counts_items = True
    cross_entropy_with = None

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        init: Init = "crowd", offset: float = 1e-2, class_prior: ClassPrior = "crowd",
        learn_class_prior: bool = False, **common: Unpack[SizeOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, **common)
        check_choice(Init, init=init)
        check_choice(ClassPrior, class_prior=class_prior)
        if not 0 < offset < math.inf:
            raise ValueError(f"offset={offset!r} must be above 0: it keeps the log of a count of 0 finite")
        if init != "identity" or class_prior != "uniform":
            self.require_a_label_per_class(f"MaxMIG(init={init!r}, class_prior={class_prior!r})")
        self.init: Init = init
        self.offset = offset
        self.class_prior: ClassPrior = class_prior
        self.annotators = NormalizedConfusion(
            num_annotators, num_classes, self.num_labels, normalization="softmax", on=2.0, off=0.0
        )
        self.prior_logits = nn.Parameter(torch.zeros(num_classes), requires_grad=learn_class_prior)

    @override
    def on_train_start(self, annotations: Annotations | None = None, predict: Predict | None = None) -> None:
        """Sets matrices and class prior from the votes, where asked for and annotations are given."""
        if annotations is None:
            return
        with torch.no_grad():
            if self.init != "identity":
                assign(self.annotators.weight, log_confusions(annotations, self.init, self.offset, self.num_classes))
            if self.class_prior != "uniform":
                assign(self.prior_logits, log_class_prior(annotations, self.class_prior, self.num_classes))

    @override
    def confusion(self) -> Tensor:
        """``[R, C, K]``: softmax of the rows of W_r."""
        return self.annotators.probs()

    def aggregate(self, annotations: Annotations) -> Tensor:
        """Log of the aggregator's guess, ``[B, C]``; the prior for an item without labels."""
        dtype = torch.promote_types(self.annotators.weight.dtype, torch.float32)
        log_prior = self.prior_logits.to(dtype).log_softmax(0)
        return (log_prior + label_log_likelihood(self.annotators.weight, annotations)).log_softmax(-1)

    def _loss(self, batch: Batch) -> Tensor:
        logits, labelled = batch.logits, batch.annotations.counts > 0
        column = labelled.unsqueeze(1)
        log_h = logits.where(column, 0.0).log_softmax(-1)
        log_prior = self.prior_logits.to(logits.dtype).log_softmax(0)
        log_ratio = self.aggregate(batch.annotations).to(logits.dtype) - log_prior
        own = (log_h + log_ratio).logsumexp(-1)
        ratio = log_ratio.exp().where(column, 0.0)
        others = (log_h.exp() * (ratio.sum(0) - ratio)).sum(-1) / (labelled.sum() - 1).clamp(min=1)
        return reduce_items((others - 1 - own).where(labelled, 0.0), labelled, batch.reduction)

    def _nll(self, batch: Batch) -> Tensor:
        """Of held-out labels, for ``log_likelihood``: the mixture link; the loss is another one."""
        return batch.mixture_nll(self.annotators.weight, "softmax")

    def _posterior(self, batch: Batch) -> Tensor:
        log_p, weight = batch.logits.log_softmax(-1), self.annotators.weight
        return crowd_posterior(log_p, weight, batch.annotations, normalization="none")
