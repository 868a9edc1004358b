"""EM and marginal fine-tuning with a confusion for every pair of item and annotator: what LIA and LIA-ML share."""

from __future__ import annotations

import copy
from typing import Literal, Self, Unpack

import torch
from torch import Tensor
from typing_extensions import override

from crowdnal._utils.options import check_amount, check_choice, check_integer
from crowdnal.data import Annotations
from crowdnal.functional import Reduction, segment_sum
from crowdnal.functional.segments import gather_rows
from crowdnal.objectives._bases.base import Predict, SizeOptions
from crowdnal.objectives._bases.batch import Batch
from crowdnal.objectives._bases.rounds import CALL, RoundsObjective
from crowdnal.objectives._bases.run_state import of_run
from crowdnal.objectives._bases.targets import labelled, reduce_items
from crowdnal.objectives.lia.modules import BLOCK_NUMBERS, REFERENCES, PairModel, PairOptions, spaced

Finetune = Literal["item", "annotation", "none"]
_USUAL = (1.0, 0.1)
"""Precisions of competence and difficulty once training has begun."""


class PairEMOptions(SizeOptions, PairOptions, total=False):
    """Those of :class:`PairEM`, but for the tags."""

    epochs_per_round: int
    rounds: int
    finetune: Finetune
    use_prior: bool
    competence_precision: float | None
    difficulty_precision: float | None


class PairEM(RoundsObjective):
    """Base of LIA and LIA-ML, whose ``self.pairs`` gives ``log Q_n[k, y_n]`` of every annotation.

    Args:
        num_tags: of an instance; 1: items are instances.
        tag_dim: length of a tag's embedding.
        rounds: M-steps before fine-tuning, 0 or more.
        finetune: ``"item"`` or ``"annotation"``: which marginal likelihood (:class:`crowdnal.objectives.LIA`);
            ``"none"``: EM for as long as training lasts.
        use_prior: the classifier is part of the E-step, or only the labels of an item are.
        competence_precision: τ of a Gaussian prior on competence, not in the paper: ``τ/2 Σ_r ‖C(r) - C(0)‖²`` joins
            the negative log-likelihood of all annotations (C(0): features or embedding all 0). Annotators of a handful
            of labels stay near the others, so that :meth:`reliability` ranks those first who are known to be good;
            about 1 where many have few labels. Above 0 it needs ``on_train_start``, which tells how many each gave.
            None: 1 if that was called, else 0.
        difficulty_precision: τ of a Gaussian prior on difficulty, not in the paper: ``τ/2 Σ_i ‖D(x_i)‖²`` joins it too.
            D has the features that the classifier has, and without a prior explains by them what annotators say of
            hard items, which is then taken for mistakes. None: 0.1 if ``on_train_start`` was called, else 0.
        instance: D is of the item's ``"features"``, or (LIA-E) of an ``"embedding"`` for each instance.
        num_items: N, for embeddings of instances: ``item_id``, below N, says whose.
        num_latents: L; 1 adds difficulty and competence, with more an annotator can be good at some of the items.
        hidden_dim: units of hidden layers.
        num_layers: hidden layers of D.
        competence_layers: hidden layers of C; 0 = linear, the paper.
        embedding_dim: of annotators and, for LIA-E, instances.
        feature_dim: length of the features; None: inferred by ``attach``, or from the first batch (make that before
            ``DistributedDataParallel`` or ``torch.compile``).
        annotator_features: ``[R, F]``, known facts about annotators, standardised; None: embeddings.
        init_diagonal: what C is initialised to for equal class and label; 0 elsewhere.
    """

    parts = (PairModel,)
    cross_entropy_with = None
    stored = ("targets", "references", "reference_targets")
    needs_features = True

    pairs: PairModel
    references: Tensor = of_run("references")
    reference_targets: Tensor = of_run("reference_targets")
    _labels_of: Tensor | None = of_run("_labels_of")

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        rounds: int = 10, finetune: Finetune = "item", use_prior: bool = True,
        competence_precision: float | None = None, difficulty_precision: float | None = None,
        epochs_per_round: int = 1, num_tags: int = 1, tag_dim: int = 16,
        num_labels: int | None = None, reduction: Reduction = "mean", **pairs: Unpack[PairOptions],
    ) -> None:  # fmt: skip
        super().__init__(
            num_classes, num_annotators, num_labels=num_labels, reduction=reduction, epochs_per_round=epochs_per_round
        )
        check_integer(0, rounds=rounds)
        check_choice(Finetune, finetune=finetune)
        check_amount(competence_precision=competence_precision or 0.0, difficulty_precision=difficulty_precision or 0.0)
        if rounds == 0 and finetune == "none":
            raise ValueError("rounds=0 with finetune='none' leaves nothing to train: give one round or more")
        self.rounds = rounds
        self.finetune: Finetune = finetune
        self.use_prior = use_prior
        self.competence_precision = competence_precision
        self.difficulty_precision = difficulty_precision
        self.marginal = rounds == 0
        self.needs_features = pairs.get("instance", "features") == "features"
        sizes = num_classes, self.num_labels, num_annotators
        self.pairs = PairModel(*sizes, num_tags=num_tags, tag_dim=tag_dim, **pairs)
        self.references = torch.zeros(0, 0)
        self.reference_targets = torch.zeros(0, num_tags, num_classes)
        self._labels_of = None
        self._votes_only = False

    @property
    def _precisions(self) -> tuple[float, float]:
        """Of the priors on competence and on difficulty."""
        competence, difficulty = (0.0, 0.0) if self._labels_of is None else _USUAL
        if self.competence_precision is not None:
            competence = self.competence_precision
        if self.difficulty_precision is not None:
            difficulty = self.difficulty_precision
        return competence, difficulty

    @property
    def em_epochs(self) -> int:
        """Epochs before fine-tuning begins."""
        return self.rounds * self.epochs_per_round

    @override
    def set_feature_dim(self, feature_dim: int) -> None:
        if self.pairs.instances is None:
            self.pairs.set_feature_dim(feature_dim)

    @override
    def on_epoch_start(self, epoch: int) -> None:
        """Makes a round where one is due; fine-tuning begins with epoch ``em_epochs``."""
        super().on_epoch_start(epoch)
        self.marginal = self.finetune != "none" and epoch >= self.em_epochs

    @override
    def confusion(self) -> Tensor:
        """``[R, C, K]``, the same instances for everyone: row k is the mean over those of class k in the training set.

        That is of up to 128 of it, weighted by ``targets``. Their features are those of the last round (before the
        first: an instance whose features are all 0). Several tags count the same.
        """
        return self._confusion().mean(1)

    @torch.no_grad()
    def with_annotators(self, new: int | Tensor) -> Self:
        """A copy that knows further annotators, numbered from R on, without any of their labels.

        Their labels then count in :meth:`posterior`, and training can go on with them.

        Args:
            new: features ``[M, F]`` of the new ones, or, where annotators have embeddings, their number: each gets the
                mean of all embeddings.
        """
        other = copy.deepcopy(self)
        other.num_annotators += other.pairs.annotators.extend(new)
        other._labels_of = None  # training is given all annotations anew
        return other

    def _confusion(self) -> Tensor:
        """``[R, tags, C, K]``."""
        return self.pairs.confusion(self.references, self.reference_targets)

    def _due(self, epoch: int) -> bool:
        # the marginal likelihood alone needs no rounds: it makes them only where it can
        return super()._due(epoch) and (self.rounds > 0 or self._predict is not None)

    def _round(self, batch: Batch) -> Tensor:
        logits, annotations, features, _, _ = batch
        if self._votes_only:
            self._keep_references(annotations, features)
            return self._each(logits, annotations, features).double().sum()
        classes, labels, latents = self.pairs.shape
        step = max(1, BLOCK_NUMBERS // (classes * labels * latents))
        total, targets = torch.zeros((), dtype=torch.float64, device=logits.device), []
        for first in range(0, len(logits), step):
            rows = slice(first, first + step)
            some = annotations if step >= len(logits) else annotations[rows]
            log_h, evidence = self._log_joint(logits[rows], some, None if features is None else features[rows])
            total += (log_h + evidence).logsumexp(1).where(labelled(some), 0.0).double().sum()
            targets.append(self._truth(log_h, evidence, some))
        self._set_targets(torch.cat(targets) if targets else self.targets)
        self._keep_references(annotations, features)
        return total

    def _keep_references(self, annotations: Annotations, features: Tensor | None) -> None:
        """The instances for which confusions are shown, and the targets of all their tags."""
        ids, num_tags = self.pairs.item_ids(annotations), self.pairs.num_tags
        instances, of = torch.unique(ids // num_tags, return_inverse=True)
        chosen = spaced(len(instances), REFERENCES).to(of.device)
        targets = self.targets.new_ones(len(instances), num_tags, self.num_classes)
        targets[of, ids % num_tags] = self.targets
        self.reference_targets = targets[chosen]
        if self.pairs.instances is not None:
            self.references = self.pairs.instances[instances[chosen]].to(self.references)
        elif features is not None:
            first = torch.argsort(of, stable=True)[torch.searchsorted(of.sort().values, chosen)]
            self.references = features.flatten(1)[first].to(self.references)

    def _log_joint(self, logits: Tensor, annotations: Annotations, features: Tensor | None) -> tuple[Tensor, Tensor]:
        """log h and what the labels say ``Σ_r w_r log Q[k, y_r]``, both ``[B, C]``."""
        log_q = self._weighted(self.pairs(annotations, features, logits.dtype), annotations)
        return logits.log_softmax(-1), segment_sum(log_q, annotations)

    def _truth(self, log_h: Tensor, evidence: Tensor, annotations: Annotations) -> Tensor:
        """The E-step: ``[B, C]``, h where there are no labels."""
        if self.use_prior:
            return (log_h + evidence).softmax(-1)
        return evidence.where(labelled(annotations).unsqueeze(1), log_h).softmax(-1)

    def _loss(self, batch: Batch) -> Tensor:
        logits, annotations, features, _, reduction = batch
        counted = labelled(annotations)
        logits = logits.where(counted.unsqueeze(1), 0.0)  # what does not count may be anything
        if self.marginal and self.finetune == "annotation" and not self._votes_only:
            likelihood = self._each(logits, annotations, features).unsqueeze(1)
            each = -segment_sum(self._weighted(likelihood, annotations), annotations).squeeze(1)
        else:
            log_h, evidence = self._log_joint(logits, annotations, features)
            # a single label tells nothing of who gave it, and its item's difficulty could explain it without h
            joint = log_h + evidence * (0.0 if self._votes_only else 1.0)
            if self.marginal and not self._votes_only:
                each = -joint.logsumexp(-1)
            else:
                targets = self._rows(annotations).to(joint.dtype)
                each = -(targets * joint).where(targets > 0, 0.0).sum(-1)
        competence, difficulty = self._precisions
        if difficulty > 0:
            each = each + difficulty / 2 * self.pairs.size(annotations, features, logits.dtype)
        if competence > 0:
            penalty = self._penalty(annotations, competence, logits.dtype).unsqueeze(1)
            each = each + segment_sum(penalty, annotations).squeeze(1)
        return reduce_items(each.where(counted, 0.0), counted, reduction)

    def _penalty(self, annotations: Annotations, precision: float, dtype: torch.dtype) -> Tensor:
        """``[nnz]`` a label's part of its annotator's prior: over an epoch each counts once, whatever the batches."""
        if self._labels_of is None:
            option = f"competence_precision={self.competence_precision}"
            raise RuntimeError(f"{option} needs to know how many labels annotators gave: {CALL}")
        labels = self._labels_of[annotations.annotator].clamp(min=1)
        return precision / 2 * self.pairs.spread(annotations, dtype) / labels

    def _remember(self, annotations: Annotations, predict: Predict | None) -> Annotations:
        annotations = super()._remember(annotations, predict)
        self._votes_only = self.rounds > 0 and not bool((annotations.counts > 1).any())
        given = annotations.annotator
        self._labels_of = torch.zeros(self.num_annotators, dtype=given.dtype, device=given.device).index_add(
            0, given, torch.ones_like(given)
        )
        return annotations

    def _each(self, logits: Tensor, annotations: Annotations, features: Tensor | None) -> Tensor:
        """``log Σ_k h_k Q_n[k, y_n]`` ``[nnz]``."""
        every = torch.arange(annotations.num_annotations, device=logits.device)
        log_h = gather_rows(logits.log_softmax(-1), annotations.item, every)
        return (log_h + self.pairs(annotations, features, logits.dtype)).logsumexp(-1)

    def _weighted(self, values: Tensor, annotations: Annotations) -> Tensor:
        """``[nnz, ...]`` times the weights of the annotations."""
        return values if annotations.weight is None else values * annotations.weight.to(values.dtype).unsqueeze(1)

    def _log_likelihood(self, batch: Batch) -> Tensor:
        return self._each(batch.logits, batch.annotations, batch.features)

    def _posterior(self, batch: Batch) -> Tensor:
        log_h, evidence = self._log_joint(batch.logits, batch.annotations, batch.features)
        return self._truth(log_h, evidence, batch.annotations)
