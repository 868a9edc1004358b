"""CMM: Mena & Ñanculef, Revisiting ML from Crowds: a Mixture Model for Grouping Annotations, CIARP 2019."""

from __future__ import annotations

from typing import Any, Literal, Unpack

import torch
from torch import Tensor
from typing_extensions import override

from crowdnal._utils.options import check_amount, check_choice, check_integer
from crowdnal.aggregation import vote_proportions
from crowdnal.aggregation.em import crowd_or_right
from crowdnal.data import Annotations, of_classes
from crowdnal.functional.segments import annotation_weight
from crowdnal.objectives._bases.base import Objective, Predict
from crowdnal.objectives._bases.batch import Batch
from crowdnal.objectives._bases.cross_entropy import Target
from crowdnal.objectives._bases.rounds import RoundsOptions
from crowdnal.objectives._registry import register
from crowdnal.objectives.cmm.em import Expected, as_one, expect, expect_annotators, label_cells, maximise
from crowdnal.objectives.cmm.grouped import GroupedObjective
from crowdnal.objectives.cmm.init import cluster_annotators, cluster_labels, initial_counts
from crowdnal.objectives.cmm.mixture import GroupMixture

Training = Literal["em", "gradient"]
Setting = Literal["individual", "global"]
Grouped = Literal["annotations", "annotators"]
Gate = Literal["constant", "features"]


@register("cmm", link="Σ_m α_m p β^m: groups of annotations share a confusion", source="Mena & Ñanculef 2019")
class CMM(GroupedObjective):
    """Each label comes from one of M groups: ``p(y=j|x) = Σ_m α_m Σ_k β^m[k, j] f_k(x)``, f the classifier.

    Parameters (M·C·K, hence no ``rank``) and cost do not depend on the number of annotators, who need not even be
    known. ``training="em"`` refreshes its targets between epochs (E-step and closed forms, equations 4 to 7); in
    between the classifier is trained on the expected number of an item's labels for each class, so that an item counts
    as often as it was labelled. ``training="gradient"`` minimises ``-log p(y|x)`` end to end (not in the paper); hooks
    are optional, ``on_train_start`` brings the init from K-means.

    **What is identified.** The likelihood depends on the mean confusion ``Σ_m α_m β^m`` alone: the classifier learns
    what it could with a single confusion, and how that one is divided among the groups is decided by the init, K-means
    of the labels. ``grouped="annotators"`` (not in the paper) takes all labels of an annotator to come from one group,
    which does identify the groups if annotators give several labels each.

    Where the authors' code differs: its K-means takes all pairs of item and label; its rounds also go on until the
    confusions change by less than the tolerance. The published numbers have one epoch of Adam a round (never reset),
    batches of 64, ``laplace=True, tolerance=0.03``, at most 50 rounds, and the best of 20 restarts
    (:func:`crowdnal.best_of_restarts`); Individual and Global differ only in what is measured.

    Args:
        num_groups: M.
        training: ``"em"`` (needs K = C) or ``"gradient"``.
        setting: ``"individual"``: annotators are known, ``confusion()`` and ``log_likelihood`` mix the groups by each
            one's posterior (``β_a = Σ_m p(m|a) β^m``, section 3.4), which every round makes anew; before the first, and
            in the ``"global"`` setting, by α.
        grouped: what belongs to a group, each of the ``"annotations"`` or of the ``"annotators"`` (EM only).
        gate: ``"constant"``, or ``"features"``: ``α(x) = softmax(log α + W x)``, a mixture of experts, initialised
            to W = 0; gradient form only.
        smoothing: pseudo-count for every group and (in the mean) cell, 0 or more; 0 is equation 6, and never lowers the
            likelihood.
        laplace: the cells' are equal, as in the authors' code, which makes every label of many classes likely;
            otherwise (EM, K = C) in the proportions of the crowd's confusion, counted against the votes.
        max_rounds: 1 or more.
        tolerance: no more rounds, and :attr:`converged` (a loop may end), once the log-likelihood changes by less than
            this part of it.
        seed: of K-means.
        feature_dim: D, for the gate. None: inferred by ``attach``, or from the first batch.
    """

    cross_entropy_with: Target = "labels"  # as many class weights as labels in either form

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        num_groups: int = 3, training: Training = "em", setting: Setting = "individual",
        grouped: Grouped = "annotations", gate: Gate = "constant", smoothing: float = 1.0, laplace: bool = False,
        max_rounds: int = 50, tolerance: float = 1e-5, seed: int = 0, feature_dim: int | None = None,
        **common: Unpack[RoundsOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, **common)
        check_choice(Training, training=training)
        check_choice(Setting, setting=setting)
        check_choice(Grouped, grouped=grouped)
        check_choice(Gate, gate=gate)
        check_integer(1, num_groups=num_groups, max_rounds=max_rounds)
        check_integer(0, seed=seed)
        if seed >= 2**32:
            raise ValueError(f"seed={seed} must be less than 2**32, as scikit-learn's K-means takes it")
        check_amount(smoothing=smoothing, tolerance=tolerance)
        if training == "em":
            self.require_a_label_per_class("CMM(training='em')")
            if gate == "features":
                raise ValueError("gate='features' has no closed form: use training='gradient'")
        if grouped == "annotators" and (training == "gradient" or setting == "global"):
            raise ValueError(
                "grouped='annotators' needs all labels of known annotators at once: use training='em' and "
                "setting='individual'"
            )
        self.form: Training = training
        self.cross_entropy_with = "labels" if training == "gradient" else "targets"
        self.setting: Setting = setting
        self.grouped: Grouped = grouped
        self.gate: Gate = gate
        self.smoothing, self.max_rounds, self.tolerance, self.seed = smoothing, max_rounds, tolerance, seed
        self.laplace = laplace
        self.needs_features = gate == "features"
        self.mixture = GroupMixture(
            num_groups, num_classes, self.num_labels, trained=training == "gradient", gated=self.needs_features,
            feature_dim=feature_dim,
        )  # fmt: skip
        self.membership = torch.zeros(0, num_groups)
        self._cells: Annotations | None = None  # of the run's annotations
        self._crowd: Tensor | None = None

    @property
    def converged(self) -> bool:
        """Whether the last round of EM changed the log-likelihood by less than the tolerance."""
        if self.form == "gradient" or len(self.history) < 2:
            return False
        before, now = (made.log_likelihood for made in self.history[-2:])
        return abs(now - before) <= self.tolerance * abs(before)

    @override
    def on_train_resume(self, annotations: Annotations | None = None, predict: Predict | None = None) -> None:
        """Goes on with what a checkpoint brought."""
        if self.form == "em":
            super().on_train_resume(annotations, predict)
        elif annotations is not None:  # there are no targets
            self._remember(annotations, predict)

    def _due(self, epoch: int) -> bool:
        if self.form == "gradient":  # a round only tells who belongs where
            return super()._due(epoch) and self._predict is not None and self.setting == "individual"
        return super()._due(epoch) and len(self.history) < self.max_rounds and not self.converged

    def _init_targets(self, annotations: Annotations) -> None:
        if self.num_labels < self.num_classes:
            return
        a = annotations
        votes = vote_proportions(of_classes(a, self.num_classes), self.num_classes)
        groups = self.mixture.weights().shape[0]
        if self.grouped == "annotators":
            mine = cluster_annotators(a, votes, groups, self.seed)[a.annotator]
        else:
            a = self._cells_of(a)
            mine = cluster_labels(a, votes, groups, self.seed)
        self.membership = self.membership[:0]
        self._take(initial_counts(a, votes, mine, groups))

    def _round(self, batch: Batch) -> Tensor:
        logits, annotations, features = batch.logits.double(), batch.annotations, batch.features
        if self.form == "gradient":
            likelihood = -self._nll(batch._replace(logits=logits, reduction="sum"))
        else:
            model = self.mixture.log_alpha.double(), self.mixture.log_beta.double()
            if self.grouped == "annotators":
                found = expect_annotators(logits.log_softmax(1), *model, annotations)
            else:
                found = expect(logits.log_softmax(1), *model, self._cells_of(annotations))
            likelihood = found.log_likelihood
            self._take(found)
        if self.setting == "individual":
            self.membership = self.group_posteriors(logits, annotations, features).to(self.membership)
        return likelihood

    def _remember(self, annotations: Annotations, predict: Predict | None) -> Annotations:
        self._cells = None
        annotations = super()._remember(annotations, predict)
        self._crowd = None
        if not self.laplace and self.form == "em" and self.num_classes == self.num_labels:
            votes, all_labels = vote_proportions(annotations, self.num_classes), as_one(annotations)
            weight = annotation_weight(annotations, None, votes.dtype)
            self._crowd = crowd_or_right(votes, all_labels, weight, None).t()
        return annotations

    def _cells_of(self, annotations: Annotations) -> Annotations:
        cells = label_cells(annotations) if self._cells is None else self._cells
        self._cells = cells.to(annotations.device)
        return self._cells

    def __getstate__(self) -> dict[str, Any]:
        """Without the run."""
        return {**super().__getstate__(), "_cells": None, "_crowd": None}

    def _take(self, found: Expected) -> None:
        crowd = None if self._crowd is None else self._crowd.to(found.counts)
        self.mixture.set(*maximise(found, self.smoothing, crowd))
        if self.form == "em":
            self._set_targets(found.targets)

    def _loss(self, batch: Batch) -> Tensor:
        return Objective._loss(self, batch) if self.form == "gradient" else super()._loss(batch)

    @override
    def _units(self, annotations: Annotations) -> Tensor:
        return Objective._units(self, annotations) if self.form == "gradient" else super()._units(annotations)

    @override
    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, training={self.form!r}"
