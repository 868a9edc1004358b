"""Base of objectives with stored posteriors whose confusions are estimated in closed form, not by gradients."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor
from typing_extensions import override

from crowdnal.aggregation import dawid_skene, vote_proportions
from crowdnal.aggregation.em import (
    FLOOR,
    Prior,
    check_gold,
    check_prior,
    check_smoothing,
    classes_of,
    log_proportions,
    possible,
    pseudo_counts_of,
)
from crowdnal.data import Annotations, as_gold, of_classes
from crowdnal.functional import em_step
from crowdnal.functional.segments import annotation_weight
from crowdnal.objectives._bases.base import ObjectiveOptions, Predict
from crowdnal.objectives._bases.batch import Batch
from crowdnal.objectives._bases.item_rows import GIVE, item_rows
from crowdnal.objectives._bases.rounds import RoundsObjective, RoundsOptions
from crowdnal.objectives._bases.run_state import of_run
from crowdnal.objectives._bases.targets import labelled


class BeforehandOptions(ObjectiveOptions, total=False):
    """What may be known of classes and confusions before training, the prior excepted."""

    gold: Any
    initial_confusion: Tensor | None


class KnownOptions(BeforehandOptions, total=False):
    """What may be known of classes and confusions before training."""

    confusion_prior: Prior


class ClosedFormObjective(RoundsObjective):
    """``log_confusion [R, K, C]``, a buffer: expected counts plus pseudo-counts, as distributions over labels.

    Args:
        smoothing: pseudo-count added to every cell of every confusion.
        gold: known true classes of the training set, by position, as :func:`crowdnal.data.as_gold` takes them. They
            hold throughout.
        initial_confusion: ``[R, C, K]``, **init only**: the first targets are an E-step with it (and every class
            equally probable) instead of the votes. It alone allows K < C; with K > C the labels behind the classes
            ("unsure") are no votes, but tell of the class by how often it meets them.
        confusion_prior: ``[C, K]`` or ``[R, C, K]`` pseudo-counts, **held** in every M-step (a Dirichlet prior with
            these numbers plus 1); or a number of labels of each class, or ``"crowd"``, in the proportions of the whole
            crowd's, as of :func:`crowdnal.dawid_skene`, which finds them when training starts; or None, as in the
            papers.
    """

    holds_known = True
    log_confusion: Tensor
    gold: Tensor | None = of_run("gold")
    initial: Tensor | None
    confusion_prior: Tensor | None = of_run("confusion_prior")

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        smoothing: float = 0.1, gold: Any = None, initial_confusion: Tensor | None = None,
        confusion_prior: Prior = "crowd", **common: Unpack[RoundsOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, **common)
        check_smoothing(smoothing)
        gold = None if gold is None else as_gold(gold, None, num_classes)
        if confusion_prior is not None:
            check_prior(confusion_prior, num_annotators, num_classes, self.num_labels)
        log_confusion = (2 * torch.eye(self.num_labels, num_classes)).log_softmax(0).repeat(num_annotators, 1, 1)
        if initial_confusion is None:
            self.require_a_label_per_class(f"{type(self).__name__} without initial_confusion")
        else:
            if classes_of(initial_confusion, num_annotators, self.num_labels) != num_classes:
                raise ValueError(f"initial_confusion has {initial_confusion.shape[1]} rows for {num_classes} classes")
            log_confusion = initial_confusion.float().transpose(1, 2).clamp(min=FLOOR).log().contiguous()
        self.smoothing = smoothing
        self.register_buffer("log_confusion", log_confusion)
        self.crowd_prior: Prior = None  # what a prior is made from when training starts
        if not isinstance(confusion_prior, Tensor):
            self.crowd_prior, confusion_prior = confusion_prior, None
        initial = None if initial_confusion is None else log_confusion.clone()
        self.register_buffer("initial", initial, persistent=False)
        self.gold, self.confusion_prior = gold, confusion_prior

    @override
    def set_gold(self, gold: Any, annotations: Annotations | None = None, *, weight: float = 1.0) -> None:
        """As the option ``gold=``; to be called before training."""
        if weight != 1:
            raise ValueError(f"weight={weight!r} is for objectives trained by gradients: EM holds known classes")
        super().set_gold(gold, annotations)
        self.gold = None if self.known is None else self.known.classes.to(self.log_confusion.device)

    @override
    def _remember(self, annotations: Annotations, predict: Predict | None) -> Annotations:
        annotations = super()._remember(annotations, predict)
        if self.crowd_prior is not None and self.num_classes == self.num_labels:
            self._find_prior(annotations)
        return annotations

    def _find_prior(self, annotations: Annotations) -> None:
        """Sets the pseudo-counts that ``crowd_prior`` stands for."""
        self._hold(dawid_skene(annotations, gold=self.gold, confusion_prior=self.crowd_prior).pseudo_counts)

    def _hold(self, pseudo_counts: Tensor | None) -> None:
        """Sets the prior of the confusions, ``[C, K]`` or ``[R, C, K]``."""
        self.confusion_prior = None if pseudo_counts is None else pseudo_counts.to(self.log_confusion.dtype)

    @override
    def confusion(self) -> Tensor:
        """``[R, C, K]``: the counts of the last M-step."""
        log_confusion = self.log_confusion.to(torch.promote_types(self.log_confusion.dtype, torch.float32))
        return log_confusion.softmax(1).transpose(1, 2).contiguous()

    def _init_targets(self, annotations: Annotations) -> None:
        a = annotations
        if self.gold is not None:
            check_gold(self.gold, self.num_classes, len(a))
        if self.initial is not None:
            self.log_confusion.copy_(self.initial)
            log_prior, table = torch.zeros(len(a), self.num_classes, dtype=torch.float64, device=a.device), self.initial
        else:  # votes are a posterior already, which confusions that say nothing leave as it is
            votes = vote_proportions(of_classes(a, self.num_classes), self.num_classes)
            log_prior, table = votes.log(), torch.zeros_like(self.log_confusion)
        if self.gold is not None:  # a known class may have no votes
            log_prior = log_prior.where(self.gold.unsqueeze(1) < 0, 0.0)
        _, counts = self._expect(log_prior, table, a)
        self._count(counts)

    def _expect(self, log_prior: Tensor, log_confusion: Tensor, annotations: Annotations) -> tuple[Tensor, Tensor]:
        """E-step over the whole set: sets the targets.

        Args:
            log_prior: ``[N, C]`` or ``[1, C]``, float64.
            log_confusion: ``[R, K, C]``.
            annotations: of all items.

        Returns:
            The log-likelihood of annotations and known labels, and counts ``[R, K, C]``.
        """
        known = log_prior.new_zeros(())
        if self.gold is not None:
            silent = (self.gold >= 0) & (annotations.counts == 0)
            own = log_prior.expand(len(annotations), -1)
            known = own[silent].gather(1, self.gold[silent].unsqueeze(1)).sum()
            log_prior = own.where(possible(self.gold, self.num_classes), -math.inf)
        loss, posterior, counts, _ = em_step(
            log_prior, log_confusion.double(), annotation_weight(annotations, None, torch.float64), annotations
        )
        self._set_targets(posterior)
        return known - loss, counts

    def _count(self, counts: Tensor) -> None:
        """M-step of the confusions; a label that an annotator never gave stays just possible."""
        counts = counts.double()
        self._show(log_proportions(counts, pseudo_counts_of(self.confusion_prior, self.smoothing, counts)))

    def _show(self, log_confusion: Tensor) -> None:
        """Sets the confusions, ``[R, K, C]``."""
        self.log_confusion.copy_(log_confusion.clamp(min=math.log(FLOOR)))

    def _informed(self, annotations: Annotations) -> Tensor:
        """Items with labels, or known ones."""
        informed = labelled(annotations)
        if self.gold is None:
            return informed
        return informed | (self._gold_of(annotations) >= 0)

    def _gold_of(self, annotations: Annotations) -> Tensor:
        assert self.gold is not None
        item_id = self._numbers.of(annotations)
        if item_id is not None:
            return self.gold[item_rows(item_id, self._row_of, len(self.gold))]
        if len(annotations) == len(self.gold):
            return self.gold
        raise ValueError(
            f"annotations have no item_id and {len(annotations)} items, but gold has {len(self.gold)}: {GIVE}"
        )

    def _nll(self, batch: Batch) -> Tensor:
        """Of held-out labels, for ``log_likelihood``: the mixture link; the loss is another one."""
        return batch.mixture_nll(self.log_confusion.to(batch.logits.dtype), "none")
