"""Dawid-Skene with a network as the prior: Raykar et al., Learning From Crowds, JMLR 2010; AggNet; generalized EM."""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor
from typing_extensions import override

from crowdnal._utils.distributed import num_processes, sum_over_processes
from crowdnal.aggregation.em import FLOOR, possible, pseudo_counts_of
from crowdnal.data import Annotations
from crowdnal.functional import crowd_posterior, label_counts
from crowdnal.objectives._bases.base import Predict
from crowdnal.objectives._bases.batch import Batch
from crowdnal.objectives._bases.closed_form import ClosedFormObjective, KnownOptions
from crowdnal.objectives._registry import register


@register("dl-em", link="EM: posterior ∝ p Π A_r, then p and A_r in closed form", source="Raykar et al. 2010, AggNet")
class DLEM(ClosedFormObjective):
    """EM: the posterior of each item given classifier and annotations, then classifier and confusions given it.

    The E-step, over the whole training set before an epoch, is ``q_i[k] ∝ p_i[k] Π_n A_r[k, y_n]``; the M-step is
    cross-entropy of the classifier against q, in the epochs that follow, and the expected counts of the labels for A.
    There is no class prior beside the classifier. Raykar et al. (2010) have a logistic regression there, AggNet
    (Albarqouni et al. 2016) and the generalized EM of Tanno et al. (2019) a network, DL-EM is its name in Rodrigues &
    Pereira (2018) and Mena & Ñanculef (2019). With an M-step that maximises, the likelihood (plus the pseudo-counts'
    log-density) never falls: ``history``.

    The papers count without pseudo-counts (Raykar et al. offer a Beta prior); 0.1 per cell keeps what an annotator
    never did from being impossible.

    ``incremental=True`` needs no hooks and stores nothing by item: each training batch makes the E-step of its own
    items and adds their counts to running ones, ``counts = decay · counts + batch's`` (online EM, Cappé & Moulines
    2009); A follows at once. Under several processes the counts are summed over all.

    Args:
        epochs_per_round: epochs of a round's M-step.
        incremental: see above; without it ``on_train_start`` and ``on_epoch_start`` are needed.
        decay: of the running counts per batch, at least 0 and below 1; 0.99 remembers about 100 batches.
    """

    running: Tensor

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        incremental: bool = False, decay: float = 0.99, epochs_per_round: int = 1, smoothing: float = 0.1,
        **known: Unpack[KnownOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, epochs_per_round=epochs_per_round, smoothing=smoothing, **known)
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay!r} must be at least 0 and below 1: the part of the counts that stays")
        if incremental and self.class_weight is not None:
            raise ValueError(
                "class_weight needs targets that are known before the batch, by which a mean is divided: leave out "
                "incremental=True"
            )
        self.incremental = incremental
        self.decay = decay
        # a label per class and annotator in the shape of the init, which the first batches replace
        self.register_buffer("running", self.log_confusion.exp() if incremental else None)

    @override
    def on_train_start(self, annotations: Annotations | None = None, predict: Predict | None = None) -> None:
        """Makes the first targets; nothing where ``incremental``."""
        if not self.incremental:
            super().on_train_start(annotations, predict)

    @override
    def on_train_resume(self, annotations: Annotations | None = None, predict: Predict | None = None) -> None:
        """Goes on with the targets of a checkpoint; nothing where ``incremental``."""
        if not self.incremental:
            super().on_train_resume(annotations, predict)

    def _due(self, epoch: int) -> bool:
        return not self.incremental and super()._due(epoch)

    def _round(self, batch: Batch) -> Tensor:
        log_prior = batch.logits.double().log_softmax(-1)
        likelihood, counts = self._expect(log_prior, self.log_confusion, batch.annotations)
        self._count(counts)
        return likelihood

    def _loss(self, batch: Batch) -> Tensor:
        if not self.incremental:
            return super()._loss(batch)
        logits, annotations = batch.logits, batch.annotations
        with torch.no_grad():
            log_prior = logits.detach().log_softmax(-1)
            if self.gold is not None:
                log_prior = log_prior.where(possible(self._gold_of(annotations), self.num_classes), -math.inf)
            table = self.log_confusion.to(logits.dtype)
            targets = crowd_posterior(log_prior, table, annotations, normalization="none")
            if self.training and (annotations.num_annotations > 0 or num_processes() > 1):  # all or none wait
                counts = sum_over_processes(label_counts(targets, annotations))
                self.running.mul_(self.decay).add_(counts)
                self._follow()
        informed = self._informed(annotations).unsqueeze(1)
        return self.cross_entropy.of_targets(logits, targets.where(informed, 0.0), batch.reduction)

    def _follow(self) -> None:
        """The confusions of the running counts, of all annotators: in a few passes, as every batch does it."""
        pseudo_counts = pseudo_counts_of(self.confusion_prior, self.smoothing, self.running)
        counts = self.running if pseudo_counts is None else self.running + pseudo_counts
        counts = counts.clamp(min=FLOOR)
        self.log_confusion.copy_(counts.log() - counts.sum(1, keepdim=True).log())
