"""Model-bootstrapped EM: Khetan, Lipton & Anandkumar, Learning From Noisy Singly-labeled Data, ICLR 2018."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from crowdnal.aggregation.em import FLOOR, Prior, possible
from crowdnal.functional import label_counts
from crowdnal.functional.segments import annotation_weight
from crowdnal.objectives._bases.batch import Batch
from crowdnal.objectives._bases.closed_form import BeforehandOptions, ClosedFormObjective
from crowdnal.objectives._bases.targets import labelled, most_probable
from crowdnal.objectives._registry import register


@register("mbem", link="A_r counted against predictions, posterior, cross-entropy", source="Khetan et al. 2018")
class MBEM(ClosedFormObjective):
    """Confusions from the classifier's own predictions, then posteriors from these, then the classifier from those.

    A round takes the class that the classifier predicts for every item as its true class, counts class
    prior and confusions against them, and makes the targets ``q_i[k] ∝ prior[k] Π_n A_r[k, y_n]``, so that it works
    with one label per item, where the votes say nothing about who is right. The classifier is not in the posterior.
    The loss is the cross-entropy against the targets. ``log_likelihood`` of a round is that of the annotations under
    the class prior and the confusions it counted.

    Where no item has two labels the targets stay the votes, unless ``confusion_prior`` is None or pseudo-counts: what a
    classifier learns from single labels tells less of who gave them than is lost by its own mistakes.

    Where the paper differs: it counts the most probable classes and has no prior (``soft=False``,
    ``confusion_prior=None``), with which a classifier that still leaves out a class never finds it again; it retrains
    the network in each of its few rounds; here the network goes on from where it is, for ``epochs_per_round`` epochs.
    The first targets are the vote proportions.

    Args:
        epochs_per_round: epochs between rounds; enough that the classifier is better than the votes.
        soft: count the predicted probabilities; False: the most probable class, as the paper does.
    """

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        soft: bool = True, epochs_per_round: int = 10, smoothing: float = 0.1, confusion_prior: Prior = "crowd",
        **known: Unpack[BeforehandOptions],
    ) -> None:  # fmt: skip
        super().__init__(
            num_classes, num_annotators, epochs_per_round=epochs_per_round, smoothing=smoothing,
            confusion_prior=confusion_prior, **known,
        )  # fmt: skip
        self.soft = soft

    def _round(self, batch: Batch) -> Tensor:
        annotations = batch.annotations
        predicted = batch.logits.double().softmax(-1)
        if not self.soft:
            predicted = most_probable(predicted)
        kept = None
        if self.crowd_prior is not None and self.gold is None and not bool((annotations.counts > 1).any()):
            kept = self.targets.clone()
        informed = labelled(annotations)
        if self.gold is not None:
            known = self.gold >= 0
            one_hot = possible(self.gold, self.num_classes).to(predicted)
            predicted, informed = one_hot.where(known.unsqueeze(1), predicted), informed | known
        weight = annotation_weight(annotations, None, torch.float64)
        self._count(label_counts(predicted, annotations, weight=weight))
        prior = (predicted * informed.unsqueeze(1)).sum(0).clamp(min=FLOOR)
        likelihood, _ = self._expect((prior / prior.sum()).log().unsqueeze(0), self.log_confusion, annotations)
        if kept is not None:
            self._set_targets(kept)
        return likelihood
