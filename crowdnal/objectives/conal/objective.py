"""CoNAL: Chu, Ma & Wang, Learning from Crowds by Modeling Common Confusions, AAAI 2021."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from crowdnal._utils.distributed import assign
from crowdnal._utils.options import check_amount, check_choice
from crowdnal.aggregation import posterior_of_log_likelihood
from crowdnal.confusion import FreeConfusion, LowRankConfusion, eye, shared_scores, whole
from crowdnal.data import Annotations
from crowdnal.functional import crowd_cross_entropy
from crowdnal.functional.prior import DirichletPrior
from crowdnal.functional.reduction import reduce
from crowdnal.functional.segments import gather_rows
from crowdnal.objectives._bases.batch import Batch
from crowdnal.objectives._bases.confusions import ConfusionOptions, Scope, SoftmaxObjective, annotators_in
from crowdnal.objectives._registry import register
from crowdnal.objectives.conal.noise_source import NoiseSource

Mixing = Literal["logits", "probabilities"]
INIT = 2.0  # times the identity
_ALL = 80.0  # a logit whose sigmoid is 1


@register("conal", link="softmax(ω p W_g + (1-ω) p W_r), ω of item and annotator", source="Chu et al. 2021")
class CoNAL(SoftmaxObjective):
    """Each label comes from a confusion that all annotators share, with probability ω, or from its annotator's own.

    With class probabilities p, the common matrix W_g and the annotator's W_r, all initialised to 2I::

        mixing="logits"         softmax(ω p W_g + (1 - ω) p W_r)          the authors' code and published numbers
        mixing="probabilities"  ω softmax(p W_g) + (1 - ω) softmax(p W_r)  the paper

    With a ``confusion_prior`` (full rank) both begin at the logarithm of its mean when training starts, and the common
    scores are ``log(p softmax(W_g))``; None is the paper's.

    ω = sigmoid(u_r · v_i) for every annotation: u_r a normalised linear map of the annotator's features or identity,
    v_i of the item's features (two linear layers with nothing between, as in the authors' code; ``hidden_dim=None`` has
    the one of equation 3).
    As long as all matrices are equal, ω makes no difference and has no gradient: that comes with the second step.
    ``separation_weight`` times ``Σ_r ‖W_r - W_g‖`` (Frobenius, not squared) is *subtracted* from the loss. ``groups``
    share W_r, but not ω. ``confusion()`` gives the individual ones. The paper's final loss sums over an item's
    annotators and averages over items (``reduction="per_item"``); the authors' code averages over annotations.

    The published numbers: features are the raw input (here the input of the classifier's last layer, unless
    ``attach(features=...)`` says otherwise), Adam with learning rate 0.01, on LabelMe the defaults, on Music
    ``embedding_dim=80, normalize_items=False``; the epoch was chosen on clean labels.

    Adam makes full steps of a gradient however small: under ``scope="all"`` the matrix of an annotator without labels
    moves away from the common one for as long as training lasts; under ``"batch"`` it stays as it was.

    Args:
        mixing: see above.
        embedding_dim: of u and v, 1 or more.
        hidden_dim: between the two layers of v, 1 or more; None: v is one linear layer (the paper).
        normalize_items: normalise v too, which keeps ω within 0.27 to 0.73.
        separation_weight: 0 or more.
        scope: the sum is over ``"all"`` annotators, once a batch (the paper; the cost of a step grows with R), or over
            those who label something in the ``"batch"``.
        feature_dim: D of the items' features; None: inferred by ``attach``, or from the first batch (make that before
            ``DistributedDataParallel`` or ``torch.compile``).
        annotator_features: ``[R, F]``, known facts about annotators; None: their identity.
        sparse_grad: sparse gradients for what belongs to an annotator (its matrix and embedding), as
            :func:`crowdnal.functional.crowd_cross_entropy` does; needs ``scope="batch"`` (or ``separation_weight=0``)
            and `torch.optim.SparseAdam` or SGD.
    """

    needs_features = True

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        mixing: Mixing = "logits", embedding_dim: int = 20, hidden_dim: int | None = 128, normalize_items: bool = True,
        separation_weight: float = 1e-5, scope: Scope = "all", feature_dim: int | None = None,
        annotator_features: Tensor | None = None, sparse_grad: bool = False, **common: Unpack[ConfusionOptions],
    ) -> None:  # fmt: skip
        super().__init__(num_classes, num_annotators, **common)
        check_choice(Mixing, mixing=mixing)
        check_choice(Scope, scope=scope)
        check_amount("the distance is maximised", separation_weight=separation_weight)
        if sparse_grad and scope == "all" and separation_weight > 0:
            raise ValueError(
                "sparse_grad=True needs scope='batch': the distances of all annotators have a dense gradient"
            )
        self.mixing: Mixing = mixing
        self.separation_weight = separation_weight
        self.scope: Scope = scope
        self.annotators: FreeConfusion | LowRankConfusion = self.free_matrices(
            INIT, sparse_grad=sparse_grad, common=False
        )
        self.common = nn.Parameter(INIT * eye(num_classes, self.num_labels))
        self.noise_source = NoiseSource(
            num_annotators, feature_dim, embedding_dim, hidden_dim, normalize_items, annotator_features, sparse_grad
        )

    @override
    def set_feature_dim(self, feature_dim: int) -> None:
        self.noise_source.set_feature_dim(feature_dim)

    def common_confusion(self) -> Tensor:
        """``[C, K]``, detached: the common one, row = true class, rows sum to 1."""
        return whole(self.common).softmax(-1)

    @torch.no_grad()
    def per_annotation_source(self, annotations: Annotations | Tensor, features: Tensor) -> Tensor:
        """ω ``[nnz]``: the probability of each annotation to come from the common confusion, whatever its label."""
        # of the annotations' size, so that features that do not fit are what is complained about
        logits = torch.zeros(len(annotations), self.num_classes, device=annotations.device)
        batch = self.as_batch(logits, annotations, features)
        with torch.autocast(logits.device.type, enabled=False):
            return self.noise_source(features.to(batch.logits.dtype), batch.annotations).sigmoid()

    @override
    def penalty(self, annotations: Annotations) -> Tensor | None:
        """``-separation_weight · Σ_r ‖W_r - W_g‖``."""
        if self.separation_weight == 0:
            return None
        if self.scope == "all":
            return -self.separation_weight * self._of_annotators(self.annotators.distances(self.common)).sum()
        chosen, present = annotators_in(annotations)
        distances = self.annotators.distances(self.common, self._matrix_of(chosen))
        return -self.separation_weight * (distances * present).sum()

    def _nll(self, batch: Batch) -> Tensor:
        return self._of_both(batch)

    def _nll_and_prior(self, batch: Batch, prior: DirichletPrior) -> Tensor:
        if self.mixing == "logits":
            return self._of_both(batch, prior=prior)
        return self._of_both(batch) + self._prior_alone(batch, prior)

    def _of_both(self, batch: Batch, **prior: Any) -> Tensor:
        logits, annotations, features, _, _ = batch
        assert features is not None  # the base has seen to it
        scores = logits.softmax(-1)
        source = self._source(features, batch)
        individual = partial(self.annotators.nll, scores, self._by_matrix(annotations), **prior)
        return self._mixed(individual, self._together(scores), source, batch)

    def _label_log_probs(self, batch: Batch) -> Tensor:
        logits, annotations, features, _, _ = batch
        assert features is not None
        p = logits.softmax(-1)
        source = self._source(features, batch).unsqueeze(1)
        every = torch.arange(len(source), device=source.device)
        together = gather_rows(self._together(p), annotations.item, every)
        alone = self.annotators.scores(p, self._by_matrix(annotations))
        if self.mixing == "logits":
            return alone.lerp(together, source.sigmoid()).log_softmax(-1)
        both = F.logsigmoid(source) + together.log_softmax(-1), F.logsigmoid(-source) + alone.log_softmax(-1)
        return torch.logaddexp(*both)

    @override
    def _begin(self, log_crowd: Tensor) -> None:
        super()._begin(log_crowd)
        with torch.no_grad():
            assign(self.common, log_crowd)

    def _source(self, features: Tensor, batch: Batch) -> Tensor:
        """The logit of ω; all is common where no item has two labels, which tells nothing of anyone."""
        source = self.noise_source(features.to(batch.logits.dtype), batch.annotations)
        return source if self.informed is None else source.where(self.informed > 0, _ALL)

    def _together(self, p: Tensor) -> Tensor:
        """Scores ``[B, K]`` of the common confusion, which is of probabilities where it began with the crowd's."""
        common = self.common.to(p.dtype)
        if self.crowd is None:
            return p @ common
        return torch.where(self.crowd.any(), shared_scores(p, common.log_softmax(-1)), p @ common)

    def _mixed(self, individual: Callable[..., Tensor], shared: Tensor, source: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy of the labels from the scores [B, K] of the common confusion and what the individual gives."""
        if self.mixing == "logits":
            how = {"weight": batch.weight, "reduction": batch.reduction}
            return individual(**how, shared=shared, mixing=source.sigmoid())
        annotations, alone = batch.annotations, -individual(weight=torch.ones_like(source), reduction="none")
        every = torch.arange(annotations.num_annotations, device=shared.device)
        together = gather_rows(shared.log_softmax(-1), annotations.item, every)
        together = together.gather(1, annotations.label[:, None])[:, 0]
        likelihood = torch.logaddexp(F.logsigmoid(source) + together, F.logsigmoid(-source) + alone)
        return reduce(-likelihood, annotations, batch.weight, batch.reduction)

    def _posterior(self, batch: Batch) -> Tensor:
        (logits, annotations, features, _, _), each = batch, batch.each()
        assert features is not None
        source = self._source(features, batch)
        common, owners = whole(self.common).to(logits.dtype), self._by_matrix(annotations)
        certain = logits.new_ones(annotations.num_items, 1)
        # one class after the other: a row of every matrix, nothing larger than [nnz, C + K]
        nll = []
        for k in range(self.num_classes):
            individual = partial(crowd_cross_entropy, certain, self.annotators.row(k).to(logits.dtype), owners)
            nll.append(self._mixed(individual, certain @ common[k : k + 1], source, each))
        return posterior_of_log_likelihood(logits.log_softmax(-1), -torch.stack(nll, 1), annotations)
