"""LIA: Platanios et al., Learning from Imperfect Annotations: An End-to-End Approach, 2020."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from crowdnal.functional import Reduction
from crowdnal.objectives.lia.modules import Instance, PairModel
from crowdnal.objectives.lia.pair_em import Finetune, PairEM


class LIA(PairEM):
    """Every pair of item and annotator has a confusion Q, of the item's difficulty and the annotator's competence.

    ``Q[k, :] = softmax over labels of logsumexp_l (D(x) + C(r))[k, :, l]`` (eq. 1, positive tensors, in log space): D
    an MLP on the item's features, C linear in the annotator's features or embedding. With the classifier h::

        at the start      λ = the shares of an item's votes (eq. 8)
        a round of EM     λ_k ∝ h_k Π_r Q[k, y_r] (eq. 4), then minimise -Σ_k λ_k (log h_k + Σ_r log Q[k, y_r]) (eq. 7)
        fine-tuning       minimise -log Σ_k h_k Π_r Q[k, y_r]   finetune="item", the paper (eq. 9)
                          or -Σ_r log Σ_k h_k Q[k, y_r]         finetune="annotation", the authors' code

    Epochs 0 to ``rounds * epochs_per_round - 1`` are EM, all later ones fine-tuning; rounds go on then, to report the
    likelihood and keep ``targets`` fresh. With ``rounds=0`` the loss is the marginal likelihood from the start, whose
    gradient is that of EM with the E-step inside each batch: no callback is needed, and only ``start`` says that
    annotators are rather right than wrong. The paper found it worse than EM.

    The authors' code leaves h out of the E-step (``use_prior=False``). The published numbers: AMSGrad 1e-3, 1,000 steps
    of 1,024 a round, 10 rounds, and ``hidden_dim=32`` on the medical relations; a random start instead of ``start``.

    The truth of a labelled item is :meth:`posterior` (the E-step), that of an unlabelled one the classifier's h. The
    loss is a mean over labelled items; ``"item_mean"`` is the same, ``"none"`` gives each item's, ``[B]``.

    D sees the item, so that in the end it can explain the labels without h: with more steps than the data bear the
    likelihood rises and the truth gets lost. Let the likelihood of held-out annotations, given their items' other ones
    (``log_likelihood(posterior(...).log(), held_out, features)``), say when to stop. Dropout in the backbone, a little
    weight decay and ``prior`` put that off.

    Args:
        epochs_per_round: epochs of an M-step, 1 or more.
        rounds: M-steps before fine-tuning, 0 or more.
        finetune: see above; ``"none"``: EM for as long as training lasts.
        use_prior: h is part of the E-step, or only the labels of an item are.
        prior: τ of a Gaussian prior on competence, not in the paper: ``τ/2 Σ_r ‖C(r) - C(0)‖²`` joins the negative
            log-likelihood of all annotations (C(0): features or embedding all 0). Annotators of a handful of labels
            stay near the others, so that :meth:`reliability` ranks those first who are known to be good; about 1 where
            many have few labels. Above 0 it needs ``on_train_start``, which tells how many each gave.
        instance: D is of the item's ``"features"``, or (LIA-E) of an ``"embedding"`` for each item.
        num_items: N, for embeddings of items: ``item_id``, below N, says whose.
        num_latents: L; 1 adds difficulty and competence, with more an annotator can be good at some of the items.
        hidden_dim: units of hidden layers.
        num_layers: hidden layers of D.
        competence_layers: hidden layers of C; 0 = linear, the paper.
        embedding_dim: of annotators and, for LIA-E, items.
        feature_dim: length of the features; None: told by ``attach``, or read off the first batch (make that before
            ``DistributedDataParallel`` or ``torch.compile``).
        annotator_features: ``[R, F]``, known facts about annotators, standardised; None: embeddings.
        start: where C starts for equal class and label, 0 elsewhere.
    """

    name: ClassVar[str] = "lia"
    needs_features = True

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        num_labels: int | None = None,
        reduction: Reduction = "mean",
        epochs_per_round: int = 1,
        rounds: int = 10,
        finetune: Finetune = "item",
        use_prior: bool = True,
        prior: float = 0.0,
        instance: Instance = "features",
        num_items: int | None = None,
        num_latents: int = 4,
        hidden_dim: int = 16,
        num_layers: int = 4,
        competence_layers: int = 0,
        embedding_dim: int = 16,
        feature_dim: int | None = None,
        annotator_features: Tensor | None = None,
        start: float = 2.0,
    ) -> None:
        super().__init__(
            num_classes, num_annotators, num_labels=num_labels, reduction=reduction, epochs_per_round=epochs_per_round,
            rounds=rounds, finetune=finetune, use_prior=use_prior, prior=prior,
        )  # fmt: skip
        self.needs_features = instance == "features"
        self.pairs = PairModel(
            num_classes, self.num_labels, num_annotators, instance=instance, num_items=num_items,
            num_latents=num_latents, hidden_dim=hidden_dim, num_layers=num_layers, competence_layers=competence_layers,
            embedding_dim=embedding_dim, feature_dim=feature_dim, annotator_features=annotator_features, start=start,
        )  # fmt: skip
