"""Model-bootstrapped EM: Khetan, Lipton & Anandkumar, Learning From Noisy Singly-labeled Data, ICLR 2018."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from crowdnal.aggregation.em import FLOOR, possible
from crowdnal.data import Annotations
from crowdnal.functional import Reduction, label_counts
from crowdnal.functional.segments import annotation_weight
from crowdnal.objectives._bases.counted import CountedObjective
from crowdnal.objectives._bases.targets import labelled, most_probable


class MBEM(CountedObjective):
    """Confusions from the classifier's own predictions, then posteriors from these, then the classifier from those.

    A round takes the class that the classifier predicts for every item as its true class, counts class
    prior and confusions against them, and makes the targets ``q_i[k] ∝ prior[k] Π_n A_r[k, y_n]``, so that it works
    with one label an item, where the votes say nothing about who is right. The classifier is not in the posterior.
    The loss is the cross-entropy against the targets. ``log_likelihood`` of a round is that of the annotations under
    the class prior and the confusions it counted.

    Where the paper differs: it retrains the network in each of its few rounds; here the network goes on from where it
    is, for ``epochs_per_round`` epochs. The first targets are the shares of the votes.

    Args:
        epochs_per_round: epochs between rounds; enough that the classifier is better than the votes.
        smoothing: pseudo-count added to every cell of every confusion.
        gold: ``[N]`` integers, known true classes of the training set, -1 where unknown. They hold throughout.
        initial_confusion: ``[R, C, K]``, **start only**: the first targets are an E-step with it (and every class
            equally probable) instead of the votes. It alone allows C != K.
        confusion_prior: ``[C, K]`` or ``[R, C, K]`` pseudo-counts, **held** in every round (a Dirichlet prior with
            these numbers plus 1).
        soft: count the predicted probabilities instead of the most probable class. Not in the paper.
    """

    name: ClassVar[str] = "mbem"

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        num_labels: int | None = None,
        reduction: Reduction = "mean",
        epochs_per_round: int = 10,
        smoothing: float = 0.1,
        gold: Tensor | None = None,
        initial_confusion: Tensor | None = None,
        confusion_prior: Tensor | None = None,
        soft: bool = False,
    ) -> None:
        super().__init__(
            num_classes,
            num_annotators,
            num_labels=num_labels,
            reduction=reduction,
            epochs_per_round=epochs_per_round,
            smoothing=smoothing,
            gold=gold,
            initial_confusion=initial_confusion,
            confusion_prior=confusion_prior,
        )
        self.soft = soft

    def _round(self, logits: Tensor, annotations: Annotations, features: Tensor | None) -> Tensor:
        predicted = logits.double().softmax(-1)
        if not self.soft:
            predicted = most_probable(predicted)
        informed = labelled(annotations)
        if self.gold is not None:
            known = self.gold >= 0
            one_hot = possible(self.gold, self.num_classes).to(predicted)
            predicted, informed = one_hot.where(known.unsqueeze(1), predicted), informed | known
        weight = annotation_weight(annotations, None, torch.float64)
        self._count(label_counts(predicted, annotations, weight=weight))
        prior = (predicted * informed.unsqueeze(1)).sum(0).clamp(min=FLOOR)
        likelihood, _ = self._expect((prior / prior.sum()).log().unsqueeze(0), self.log_confusion, annotations)
        return likelihood

    def extra_repr(self) -> str:
        """What ``print(objective)`` adds."""
        return f"{super().extra_repr()}, soft={self.soft}"
