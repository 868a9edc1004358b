"""LIA: Platanios et al., Learning from Imperfect Annotations: An End-to-End Approach, 2020."""

from __future__ import annotations

from typing import Unpack

from crowdnal.objectives._registry import register
from crowdnal.objectives.lia.pair_em import PairEM, PairEMOptions


@register(
    "lia",
    link="EM with a confusion for every pair, of the item's features and the annotator's",
    source="Platanios et al. 2020",
)
class LIA(PairEM):
    """Every pair of item and annotator has a confusion Q, of the item's difficulty and the annotator's competence.

    ``Q[k, :] = softmax over labels of logsumexp_l (D(x) + C(r))[k, :, l]`` (eq. 1, positive tensors, in log space): D
    an MLP on the item's features, C linear in the annotator's features or embedding. With the classifier h::

        init              λ = the proportions of an item's votes (eq. 8)
        a round of EM     λ_k ∝ h_k Π_r Q[k, y_r] (eq. 4), then minimise -Σ_k λ_k (log h_k + Σ_r log Q[k, y_r]) (eq. 7)
        fine-tuning       minimise -log Σ_k h_k Π_r Q[k, y_r]   finetune="item", the left side of eq. 9
                          or -Σ_r log Σ_k h_k Q[k, y_r]         finetune="annotation", its right side

    The paper contradicts itself there: equation 9 sets out to maximise the likelihood of the labels, and prints a sum
    over annotations, which is what the authors' code computes.
    Epochs 0 to ``rounds * epochs_per_round - 1`` are EM, all later ones fine-tuning; rounds go on then, to report the
    likelihood and keep ``targets`` fresh. With ``rounds=0`` the loss is the marginal likelihood throughout, whose
    gradient is that of EM with the E-step inside each batch: no callback is needed, and only ``init_diagonal`` says
    that annotators are rather right than wrong. The paper found it worse than EM.

    The authors' code leaves h out of the E-step (``use_prior=False``). The published numbers: AMSGrad 1e-3, 1,000 steps
    of 1,024 a round, 10 rounds, and ``hidden_dim=32`` on the medical relations; a random init of C.

    The truth of a labelled item is :meth:`posterior` (the E-step), that of an unlabelled one the classifier's h. The
    loss is a mean over labelled items; ``"item_mean"`` and ``"per_item"`` are the same, ``"none"`` gives each item's,
    ``[B]``.

    Where no item has two labels nothing tells how often labels are right: the classifier is trained on the votes alone.

    D sees the item, so that in the end it can explain the labels without h: with more steps than the data bear the
    likelihood rises and the truth gets lost. Let the likelihood of held-out annotations, given their items' other ones
    (``log_likelihood(posterior(...).log(), held_out, features)``), say when to stop. Dropout in the backbone, a little
    weight decay, ``competence_precision`` and ``difficulty_precision`` put that off.
    """

    def __init__(self, num_classes: int, num_annotators: int, **options: Unpack[PairEMOptions]) -> None:
        super().__init__(num_classes, num_annotators, **options)
