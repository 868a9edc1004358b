"""What objectives share whose annotators (or groups of them) each have a confusion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor
from typing_extensions import override

from crowdnal import metrics
from crowdnal._utils.probability import proportions
from crowdnal.aggregation import dawid_skene, posterior_of_log_likelihood
from crowdnal.aggregation.em import Prior, check_prior
from crowdnal.confusion import (
    BlockwiseConfusion,
    FreeConfusion,
    LowRankConfusion,
    LowRankMixture,
    Normalization,
    NormalizedConfusion,
    StackedConfusion,
    VectorConfusion,
    shared_scores,
)
from crowdnal.data import Annotations, as_annotations
from crowdnal.functional.prior import DirichletPrior, is_one, prior_parts
from crowdnal.functional.reduction import reduction_weights
from crowdnal.functional.segments import distinct, gather_rows, labels_given
from crowdnal.objectives._bases.base import Objective, ObjectiveOptions, Predict
from crowdnal.objectives._bases.batch import Batch

Groups = Tensor | Sequence[int]
Scope = Literal["all", "batch"]
"""Which annotators a penalty is of: all of them, or those who label something in the batch."""
ALIKE = 0.5
"""Share in a prior's mean of a confusion that is as often right as the crowd's and makes all mistakes alike; the
crowd's is the rest. Counted against votes, its mistakes are partly theirs, and a classifier that has to undo all of
them overrates classes that are rarely labelled; the share that is right it has to know."""
LEAST = 1e-4
"""Least probability of a label with which a confusion begins: at 0 no gradient would bring it back."""


class ConfusionOptions(ObjectiveOptions, total=False):
    """Those of :class:`ConfusionObjective`."""

    groups: Groups | None
    rank: int | None
    confusion_prior: Prior


class ConfusionObjective(Objective):
    """Base of objectives with ``self.annotators``, a module of :mod:`crowdnal.confusion` with one matrix a group.

    Args:
        groups: ``[R]`` the group of each annotator, 0 to G-1: members of a group share a matrix; None: everyone has
            their own. Not in the papers.
        rank: each matrix is a diagonal plus one of this rank (:class:`crowdnal.confusion.LowRankConfusion`,
            :class:`crowdnal.confusion.LowRankMixture`), 1 to min(C, K), so that a thousand classes and thousands of
            annotators fit; None: full matrices. Not in the papers. ``confusion()`` still builds ``[R, C, K]``; the
            loss, ``reliability()`` and ``posterior()`` do not.
        confusion_prior: each row of an annotator's confusion has a Dirichlet prior and begins at its mean, half-way
            between the crowd's and one as often right whose mistakes are all alike, so that it moves as far as the
            labels of its annotator support. ``"crowd"``: as :func:`crowdnal.dawid_skene` finds the crowd's and the
            strength; a number: so many labels of each class; or pseudo-counts ``[C, K]``, as they are.
            ``on_train_start(annotations)`` sets it, once; without that call, with a ``rank`` or K != C, and with None,
            the confusions begin and move as in the paper. Where no item has two labels they stay, as nothing tells of
            annotators then.
    """

    fuses_prior: ClassVar[bool] = False
    """Whether ``_nll`` has a ``_nll_and_prior`` beside it, which makes both in one pass over the matrices."""

    annotators: FreeConfusion | LowRankMixture | NormalizedConfusion | BlockwiseConfusion | VectorConfusion
    groups: Tensor | None
    labels: Tensor | None
    crowd: Tensor | None
    informed: Tensor | None

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        groups: Groups | None = None, rank: int | None = None, confusion_prior: Prior = "crowd",
        **common: Unpack[ObjectiveOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, **common)
        most = min(self.num_classes, self.num_labels)
        if rank is not None and not (isinstance(rank, int) and 1 <= rank <= most):
            raise ValueError(
                f"rank={rank!r} must be 1 to min(num_classes, num_labels)={most}, or None for full matrices"
            )
        self.rank = rank
        self.num_matrices = num_annotators
        self.register_buffer("groups", None)
        if groups is not None:
            self.groups = _checked(groups, num_annotators)
            self.num_matrices = int(self.groups.max()) + 1
        if confusion_prior is not None:
            check_prior(confusion_prior, num_annotators, num_classes, self.num_labels)
            if isinstance(confusion_prior, Tensor) and confusion_prior.dim() == 3:
                raise ValueError(
                    "confusion_prior must be of all annotators, [C, K]: their own would not be the crowd's"
                )
        self.confusion_prior = confusion_prior
        self.has_prior = confusion_prior is not None and rank is None and self.num_labels == num_classes
        # pseudo-counts, 0 until training begins, and how many labels each matrix has
        self.register_buffer("crowd", torch.zeros(num_classes, self.num_labels) if self.has_prior else None)
        self.register_buffer("informed", torch.ones(()) if self.has_prior else None)
        self.register_buffer("labels", torch.zeros(self.num_matrices) if self.has_prior else None)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_nll" in vars(cls):
            cls.fuses_prior = "_nll_and_prior" in vars(cls)

    @override
    def on_train_start(self, annotations: Annotations | None = None, predict: Predict | None = None) -> None:
        """Sets the prior of the confusions, and all of them to the crowd's, unless a checkpoint brought them."""
        if annotations is None or self.crowd is None or self.labels is None or self.informed is None:
            return
        sizes = {"num_annotators": self.num_annotators, "num_classes": self.num_labels}
        owners = self._by_matrix(as_annotations(annotations, **sizes).to(self.crowd.device))
        if not bool(self.crowd.any()):
            prior = self.confusion_prior
            if isinstance(prior, Tensor):
                counts, mean = prior, proportions(prior, 1)
            else:
                found = dawid_skene(owners, confusion_prior=prior)
                if found.pseudo_counts is None:  # of no labels at all
                    return
                counts, mean = found.pseudo_counts, proportions(found.pseudo_counts, 1)
                mean = mean.lerp(_alike(mean, found.class_prior), ALIKE)
            mean = proportions(mean, 1, LEAST)
            self.crowd.copy_(counts.sum(1, keepdim=True) * mean)
            self.informed.copy_((owners.counts > 1).any())
            self._begin(mean.log())
        self.labels.copy_(labels_given(owners))

    def drop_prior(self) -> None:
        """The confusions begin and move as in the paper, as with ``confusion_prior=None``; before training only."""
        self.has_prior = False
        self.crowd = self.labels = self.informed = None
        if isinstance(self.__dict__["_modules"].get("annotators"), (FreeConfusion, StackedConfusion)):
            self.annotators.common = None

    def _begin(self, log_crowd: Tensor) -> None:
        """Sets all confusions to the crowd's, ``[C, K]``."""
        assert isinstance(self.annotators, (FreeConfusion, NormalizedConfusion, StackedConfusion))
        self.annotators.begin(log_crowd)

    def _loss(self, batch: Batch) -> Tensor:
        if self.crowd is None or self.labels is None or self.informed is None or batch.reduction == "none":
            return super()._loss(batch)
        counts = self.crowd if is_one(self.informed) else self.informed * self.crowd
        prior = DirichletPrior(counts, self.labels)
        one_pass = self.fuses_prior and isinstance(self.annotators, (FreeConfusion, NormalizedConfusion))
        if one_pass and self.cross_entropy.plain:
            return self._nll_and_prior(batch, prior)
        return super()._loss(batch) + self._prior_alone(batch, prior)

    def _nll_and_prior(self, batch: Batch, prior: DirichletPrior) -> Tensor:
        """``_nll`` and what the prior adds to it; only where a class has one beside its ``_nll``."""
        raise NotImplementedError

    def _prior_alone(self, batch: Batch, prior: DirichletPrior) -> Tensor:
        """A label's part of its annotator's prior: over an epoch each counts once, whatever the batches."""
        assert isinstance(self.annotators, (FreeConfusion, NormalizedConfusion, StackedConfusion))
        owners, dtype = self._by_matrix(batch.annotations), batch.logits.dtype
        weight, mean = reduction_weights(owners, batch.weight, batch.reduction, dtype)
        prior = DirichletPrior(prior.counts.to(dtype), prior.labels_given.to(dtype))
        index = owners.annotator, owners.order
        return prior_parts(prior, self.annotators.log_rows, *index, weight, mean=mean).loss()

    @override
    def confusion(self) -> Tensor:
        """``[R, C, K]``, detached. Built whole, also where the matrices are low-rank or shared.

        Of scores: softmax of those of a classifier that is certain of class k.
        """
        return self._of_annotators(self.annotators.probs())

    @override
    def reliability(self) -> Tensor:
        """``[R]``: :func:`crowdnal.metrics.reliability`; low-rank matrices are not built for it."""
        if isinstance(self.annotators, (LowRankMixture, BlockwiseConfusion)):
            return self._of_annotators(metrics.balanced_accuracy(self.annotators.diagonals(), self.num_classes))
        return super().reliability()

    @override
    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.groups is None else f", groups={self.num_matrices}")

    def _of_annotators(self, matrices: Tensor) -> Tensor:
        """What each annotator has of ``[G, ...]``."""
        return matrices if self.groups is None else matrices[self.groups]

    def _matrix_of(self, annotators: Tensor) -> Tensor:
        """The matrices of these annotators."""
        return annotators if self.groups is None else self.groups[annotators]

    def _by_matrix(self, annotations: Annotations) -> Annotations:
        """The annotations, as given by the owners of the matrices."""
        return annotations if self.groups is None else annotations.regroup(self.groups, self.num_matrices)

    def _require_full(self, sparse_grad: bool) -> None:
        if sparse_grad and self.rank is not None:
            raise ValueError(f"sparse_grad=True is for full matrices: leave it out with rank={self.rank}")

    def _posterior(self, batch: Batch) -> Tensor:
        if not isinstance(self.annotators, (LowRankMixture, BlockwiseConfusion)):
            return super()._posterior(batch)
        rows = self.annotators.log_likelihoods(self._by_matrix(batch.annotations)).to(batch.logits.dtype)
        return posterior_of_log_likelihood(batch.logits.log_softmax(-1), rows, batch.annotations)


class SoftmaxObjective(ConfusionObjective):
    """Base of those whose scores of labels are the class probabilities p mapped by matrices: the softmax link."""

    annotators: FreeConfusion | LowRankConfusion | StackedConfusion | VectorConfusion

    def free_matrices(
        self, scale: float = 1.0, *, sparse_grad: bool = False, common: bool = True
    ) -> FreeConfusion | LowRankConfusion:
        """A matrix per annotator (or group), initialised to ``scale`` times the identity, of the asked rank.

        ``common``: with a prior, they become what an annotator deviates from the crowd when training starts.
        """
        self._require_full(sparse_grad)
        sizes = self.num_matrices, self.num_classes, self.num_labels
        if self.rank is None:
            return FreeConfusion(*sizes, scale=scale, sparse_grad=sparse_grad, common=common and self.has_prior)
        return LowRankConfusion(*sizes, scale=scale, rank=self.rank)

    def _nll(self, batch: Batch) -> Tensor:
        return self._reduced(batch)

    def _nll_and_prior(self, batch: Batch, prior: DirichletPrior) -> Tensor:
        if self.informed is None or not is_one(self.informed):
            return self._reduced(batch, prior=prior)
        owners, weight = self._by_matrix(batch.annotations), batch.weight
        assert isinstance(self.annotators, FreeConfusion)
        return self.annotators.nll(batch.logits.softmax(-1), owners, weight, batch.reduction, prior=prior)

    def _reduced(self, batch: Batch, **prior: Any) -> Tensor:
        p, owners = batch.logits.softmax(-1), self._by_matrix(batch.annotations)
        how = owners, batch.weight, batch.reduction
        shared = self._shared(p)
        if shared is None or isinstance(self.annotators, VectorConfusion):
            return self.annotators.nll(p, *how, **prior)
        return self.annotators.nll(self._own(p), *how, shared=shared, **prior)

    def _label_log_probs(self, batch: Batch) -> Tensor:
        p, owners = batch.logits.softmax(-1), self._by_matrix(batch.annotations)
        scores, shared = self.annotators.scores(self._own(p), owners), self._shared(p)
        if shared is not None:
            every = torch.arange(len(scores), device=scores.device)
            scores = scores + gather_rows(shared, batch.annotations.item, every)
        return scores.log_softmax(-1)

    def _shared(self, p: Tensor) -> Tensor | None:
        """Scores ``[B, K]`` of the crowd's confusion, where those of annotators deviate from it."""
        if isinstance(self.annotators, (FreeConfusion, StackedConfusion)) and self.annotators.common is not None:
            return shared_scores(p, self.annotators.common)
        return None

    def _own(self, p: Tensor) -> Tensor:
        """What an annotator's own matrix maps: nothing where no item has two labels, which tells nothing of anyone."""
        return p if self.informed is None else p * self.informed.to(p.dtype)


class MixtureObjective(ConfusionObjective):
    """Base of those whose label probabilities are ``p A_r``: the mixture link."""

    annotators: LowRankMixture | NormalizedConfusion

    def stochastic_matrices(
        self, normalization: Normalization, *, sparse_grad: bool = False
    ) -> LowRankMixture | NormalizedConfusion:
        """A row-stochastic matrix per annotator (or group) of the asked rank; a low-rank one is softmax throughout."""
        self._require_full(sparse_grad)
        sizes = self.num_matrices, self.num_classes, self.num_labels
        if self.rank is None:
            return NormalizedConfusion(*sizes, normalization=normalization, sparse_grad=sparse_grad)
        return LowRankMixture(*sizes, rank=self.rank)

    def _nll(self, batch: Batch) -> Tensor:
        return self._reduced(batch)

    def _nll_and_prior(self, batch: Batch, prior: DirichletPrior) -> Tensor:
        return self._reduced(batch, prior=prior)

    def _reduced(self, batch: Batch, **prior: Any) -> Tensor:
        owners = self._by_matrix(batch.annotations)
        return self.annotators.nll(batch.logits.log_softmax(-1), owners, batch.weight, batch.reduction, **prior)


def annotators_in(annotations: Annotations) -> tuple[Tensor, Tensor]:
    """Each annotator of the batch once, in min(nnz, R) slots, and a float mask of the slots in use."""
    chosen, slot = distinct(annotations.annotator, annotations.order, annotations.num_annotators)
    return chosen, torch.zeros_like(chosen, dtype=torch.float32).scatter(0, slot, 1.0)


def _alike(confusion: Tensor, class_prior: Tensor) -> Tensor:
    """``[C, C]``: as often right as this one ``[C, C]``, every mistake as frequent as any other."""
    right = (confusion.diagonal() * class_prior).sum()
    wrong = (1 - right) / max(len(confusion) - 1, 1)
    return wrong.expand(confusion.shape).clone().fill_diagonal_(float(right))


def _checked(groups: Groups, num_annotators: int) -> Tensor:
    try:
        found = torch.as_tensor(groups)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"groups={groups!r} must be integers, one per annotator") from None
    if found.shape != (num_annotators,) or found.is_floating_point() or found.dtype == torch.bool:
        raise ValueError(
            f"groups is {found.dtype} {list(found.shape)} but must be integers [num_annotators={num_annotators}]: the "
            "group of every annotator"
        )
    if bool((found < 0).any()):
        r = int((found < 0).nonzero()[0])
        raise ValueError(f"groups[{r}]={int(found[r])} must be 0 or more: number the groups from 0")
    return found.long().clone()
