"""Objectives whose labels come from groups: what the groups, and the annotators through them, look like."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from crowdnal import metrics
from crowdnal.aggregation import posterior_of_log_likelihood
from crowdnal.data import Annotations
from crowdnal.objectives._bases.batch import Batch
from crowdnal.objectives._bases.rounds import RoundsObjective
from crowdnal.objectives._bases.run_state import of_run
from crowdnal.objectives.cmm.em import group_posteriors
from crowdnal.objectives.cmm.mixture import GroupMixture


class GroupedObjective(RoundsObjective):
    """Base of those with ``mixture``, M groups that share a confusion each, and annotators who belong to them.

    ``membership [R, M]`` is p(group | annotator); ``[0, M]`` as long as nothing is known: then it is α for everyone.
    """

    stored = ("targets", "membership")
    found_of_annotators = ("membership",)

    mixture: GroupMixture
    membership: Tensor = of_run("membership")

    @override
    def set_feature_dim(self, feature_dim: int) -> None:
        self.mixture.set_feature_dim(feature_dim)

    @override
    def confusion(self) -> Tensor:
        """``[R, C, K]``: the groups', mixed by p(group | annotator), or for everyone by α."""
        groups = self.group_confusion()
        return torch.einsum("rm,mck->rck", self._members().to(groups), groups)

    @override
    def reliability(self) -> Tensor:
        """``[R]``: :func:`crowdnal.metrics.reliability`, mixed from the groups': no annotator's matrix is built."""
        groups = metrics.balanced_accuracy(self.group_confusion().diagonal(dim1=1, dim2=2), self.num_classes)
        return self._members().to(groups) @ groups

    def group_confusion(self) -> Tensor:
        """``[M, C, K]``, detached: β, row = true class, rows sum to 1."""
        return self._shown(self.mixture.probs())

    @torch.no_grad()
    def group_weights(self, features: Tensor | None = None) -> Tensor:
        """``[M]``, detached: α; with a gate, ``[B, M]`` for features ``[B, D]``, without them that for features 0."""
        if features is None or not self.needs_features:
            return self._shown(self.mixture.weights())
        return self.mixture.log_weights(features, torch.promote_types(features.dtype, torch.float32)).exp()

    @torch.no_grad()
    def group_posteriors(
        self, logits: Tensor, annotations: Annotations | Tensor, features: Tensor | None = None
    ) -> Tensor:
        """``[R, M]``: p(group | annotator) by all labels in these annotations, of the training set or another one."""
        log_probs, log_weights, annotations = self._groups_of(logits, annotations, features)
        return group_posteriors(log_probs, log_weights, annotations)

    @torch.no_grad()
    def annotation_posteriors(
        self, logits: Tensor, annotations: Annotations | Tensor, features: Tensor | None = None
    ) -> Tensor:
        """``[nnz, M]``: p(group | item, label) of each annotation for itself."""
        log_probs, log_weights, _ = self._groups_of(logits, annotations, features)
        return (log_probs + log_weights).softmax(1)

    def _nll(self, batch: Batch) -> Tensor:
        return self.mixture.nll(batch)

    def _log_likelihood(self, batch: Batch) -> Tensor:
        if len(self.membership) == 0:
            return super()._log_likelihood(batch)
        log_probs = self.mixture.log_probs(batch.logits.log_softmax(-1), batch.annotations)
        return (log_probs + self.membership.to(log_probs).log()[batch.annotations.annotator]).logsumexp(1)

    def _posterior(self, batch: Batch) -> Tensor:
        logits, annotations = batch.logits, batch.annotations
        groups = self.group_confusion().transpose(1, 2).to(logits.dtype)
        members = self._members().to(logits.dtype)[annotations.annotator]
        rows = logits.new_zeros(len(members), self.num_classes)
        for m, group in enumerate(groups):  # no confusion of an annotator is built
            rows += members[:, m : m + 1] * group[annotations.label]
        evidence = rows.clamp(min=torch.finfo(rows.dtype).tiny).log()
        return posterior_of_log_likelihood(logits.log_softmax(-1), evidence, annotations)

    def _members(self) -> Tensor:
        """``[R, M]``: p(group | annotator), as far as known."""
        known = len(self.membership) > 0
        return self.membership if known else self.group_weights().expand(self.num_annotators, -1)

    def _shown(self, values: Tensor) -> Tensor:
        """Closed forms keep float64, of which users see what the module is in, float32 at least."""
        return values.to(torch.promote_types(self.membership.dtype, torch.float32))

    def _groups_of(
        self, logits: Tensor, targets: Annotations | Tensor, features: Tensor | None
    ) -> tuple[Tensor, Tensor, Annotations]:
        """``log p_m(y_n | x_i)`` and ``log p(m | x_i)`` of each annotation, ``[nnz, M]`` (the second ``[M]``)."""
        batch = self.as_batch(logits, targets, features)
        with torch.autocast(batch.logits.device.type, enabled=False):
            log_weights = self.mixture.log_weights(features, batch.logits.dtype)
            log_probs = self.mixture.log_probs(batch.logits.log_softmax(-1), batch.annotations)
        each = log_weights if log_weights.dim() == 1 else log_weights[batch.annotations.item]
        return log_probs, each, batch.annotations
