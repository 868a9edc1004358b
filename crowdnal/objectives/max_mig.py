"""Max-MIG: Cao et al., Max-MIG: an Information Theoretic Approach for Joint Learning from Crowds, ICLR 2019."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from crowdnal.aggregation import vote_log_confusion
from crowdnal.confusion import NormalizedConfusion
from crowdnal.data import Annotations
from crowdnal.functional import Reduction, crowd_mixture_nll, crowd_posterior, label_log_likelihood
from crowdnal.objectives._bases.base import Objective, Predict

Start = Literal["votes", "identity"]


class MaxMIG(Objective):
    """Mutual information between the classifier's and an aggregator's guess of the true class, maximised (KL form).

    The aggregator guesses from the labels alone, ``g = softmax(log prior + Σ_n W_r[y_n])``, with free matrices in the
    place of log confusions. With ``m_ij = Σ_k h_i[k] g_j[k] / prior[k]``, h the classifier's probabilities, the loss
    is ``-mean_i (1 + log m_ii) + mean_{i≠j} m_ij`` over the batch's items that have labels. Common mistakes of
    annotators are no information about the classifier's input, so that it need not follow them.

    The unit is the item: ``"mean"`` (the same as ``"item_mean"``), ``"sum"``, ``"none"`` ``[B]`` (0 without labels).
    An item alone in its batch has no second term. Under several processes pairs are formed within each one's batch.
    ``posterior`` is the paper's aggregated forecaster, ``∝ h g / prior``. Labels only determine W up to a constant for
    each (annotator, label); the shown confusion, a softmax of W's rows as in the authors' code, takes the start's.

    Where the authors' code differs: it adds random noise below 1e-4 inside the log; here all is in the log domain.
    The published numbers have ``prior="uniform"``, fixed, and ``start="votes"`` with ``offset=1e-2`` (LabelMe) or
    1e-4 (CIFAR-10).

    Args:
        start: ``"votes"``: ``W_r[k, y] = log(A_r[k, y] + offset)``, A counted over the training set with an item's mean
            vote for its true class, set by ``on_train_start(annotations)``; ``"identity"`` (also where
            ``on_train_start`` is not called): ``2 I``.
        offset: above 0, see ``start``.
        prior: ``"uniform"``, or the distribution of the training set's ``"votes"``, set by ``on_train_start``.
        learn_prior: train the prior too.
    """

    name: ClassVar[str] = "max-mig"

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        num_labels: int | None = None,
        reduction: Reduction = "mean",
        start: Start = "votes",
        offset: float = 1e-2,
        prior: Literal["uniform", "votes"] = "uniform",
        learn_prior: bool = False,
    ) -> None:
        super().__init__(num_classes, num_annotators, num_labels=num_labels, reduction=reduction)
        if start not in get_args(Start):
            raise ValueError(f"start={start!r} is unknown: use 'votes' or 'identity'")
        if prior not in ("uniform", "votes"):
            raise ValueError(f"prior={prior!r} is unknown: use 'uniform' or 'votes'")
        if not 0 < offset < math.inf:
            raise ValueError(f"offset={offset!r} must be above 0: it keeps the log of a count of 0 finite")
        if "votes" in (start, prior):
            self._needs_square("MaxMIG(start='votes') or prior='votes'")
        self.start: Start = start
        self.offset = offset
        self.prior = prior
        self.annotators = NormalizedConfusion(
            num_annotators, num_classes, self.num_labels, normalization="softmax", on=2.0, off=0.0
        )
        self.prior_logits = nn.Parameter(torch.zeros(num_classes), requires_grad=learn_prior)

    def on_train_start(self, annotations: Annotations | None = None, predict: Predict | None = None) -> None:
        """Sets start and prior from the votes, where asked for and annotations are given."""
        if annotations is None:
            return
        with torch.no_grad():
            if self.start == "votes":
                self.annotators.weight.copy_(vote_log_confusion(annotations, self.offset))
            if self.prior == "votes":
                votes = annotations.votes().double().sum(0)
                self.prior_logits.copy_(((votes + 1) / (votes + 1).sum()).log())  # no class is impossible

    def confusion(self) -> Tensor:
        """``[R, C, K]``: softmax of the rows of W_r."""
        return self.annotators.probs()

    def aggregate(self, annotations: Annotations) -> Tensor:
        """Log of the aggregator's guess, ``[B, C]``; the prior for an item without labels."""
        dtype = torch.promote_types(self.annotators.weight.dtype, torch.float32)
        log_prior = self.prior_logits.to(dtype).log_softmax(0)
        return (log_prior + label_log_likelihood(self.annotators.weight, annotations)).log_softmax(-1)

    def _loss(self, logits: Tensor, annotations: Annotations, features: Tensor | None) -> Tensor:
        labelled = annotations.counts > 0
        column = labelled.unsqueeze(1)
        log_h = logits.where(column, 0.0).log_softmax(-1)
        log_ratio = self.aggregate(annotations).to(logits.dtype) - self.prior_logits.to(logits.dtype).log_softmax(0)
        own = (log_h + log_ratio).logsumexp(-1)
        ratio = log_ratio.exp().where(column, 0.0)
        count = labelled.sum()
        others = (log_h.exp() * (ratio.sum(0) - ratio)).sum(-1) / (count - 1).clamp(min=1)
        each = (others - 1 - own).where(labelled, 0.0)
        if self.reduction == "none":
            return each
        return each.sum() if self.reduction == "sum" else each.sum() / count.clamp(min=1)

    def _log_likelihood(self, logits: Tensor, annotations: Annotations, features: Tensor | None) -> Tensor:
        ones = logits.new_ones(annotations.num_annotations)
        return -crowd_mixture_nll(
            logits.log_softmax(-1), self.annotators.weight, annotations, weight=ones, reduction="none"
        )

    def _posterior(self, logits: Tensor, annotations: Annotations, features: Tensor | None) -> Tensor:
        return crowd_posterior(logits.log_softmax(-1), self.annotators.weight, annotations, normalization="none")

    def extra_repr(self) -> str:
        """What ``print(objective)`` adds."""
        prior = f"prior={self.prior!r}, learn_prior={self.prior_logits.requires_grad}"
        return f"{super().extra_repr()}, start={self.start!r}, offset={self.offset}, {prior}"
