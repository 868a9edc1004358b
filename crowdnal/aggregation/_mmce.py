"""Minimax conditional entropy: true labels from annotators' confusions and items' difficulties, regularised."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crowdnal._utils.options import typed
from crowdnal.aggregation._votes import vote_proportions
from crowdnal.aggregation.em import AggregationResult, check_options, iterate, possible, say_collapse, weights_of
from crowdnal.data import Annotations, as_gold
from crowdnal.functional import pair_confusion, segment_sum


@dataclass
class MMCEResult(AggregationResult):
    """What `mmce` found.

    Attributes:
        posterior: ``[N, C]``, rows sum to 1; uniform for an item without annotations.
        confusion: ``[R, C, K]`` of each annotator on an item of no particular difficulty, rows sum to 1.
        objective: what is minimised, after every iteration: minus the log-likelihood plus the regulariser.
        converged: whether the last step was smaller than the tolerance.
    """

    posterior: Tensor
    confusion: Tensor
    objective: list[float]
    converged: bool


@typed
@torch.no_grad()
def mmce(
    annotations: Annotations,
    *,
    strength: float = 1.0,
    annotator_weight: float | None = None,
    item_weight: float | None = None,
    gold: Any = None,
    max_iterations: int = 50,
    tolerance: float = 1e-5,
    steps: int = 20,
    dtype: torch.dtype = torch.float64,
) -> MMCEResult:
    """Regularised minimax conditional entropy (Zhou et al. 2015, "Regularized Minimax Conditional Entropy").

    A label has the probability ``P_n[c, :] = softmax over observed of σ_r[c, :] + τ_i[c, :]``, the form that the
    minimax problem gives it: σ the confusion of the annotator, τ the difficulty of the item. Its dual is solved by
    block descent as in the paper: the posterior ``q_i[c] ∝ Π_n P_n[c, y_n]`` (every class equally probable before),
    then σ and τ against ``-Σ_i Σ_c q_i[c] Σ_n log P_n[c, y_n] + α/2 |σ|² + β/2 |τ|²``, here a few steps of L-BFGS from
    where they are, so that the objective never rises. Starts from the vote proportions.

    Args:
        annotations: the whole data set. A weight says how often its annotation counts.
        strength: γ. By default ``α = γ C²`` and ``β = α · (labels per annotator) / (labels per item)``, the paper's
            rule; it chose γ from 1/4 to 4 by the likelihood of held-out labels.
        annotator_weight: α instead, above 0.
        item_weight: β instead, above 0; large ones leave every item of the same difficulty.
        gold: known true classes, as :func:`crowdnal.data.as_gold` takes them. They hold throughout.
        max_iterations: 1 or more.
        tolerance: stop when the objective falls by less than this per annotation; a negative one never stops.
        steps: of L-BFGS per iteration, 1 or more.
        dtype: of the computation and the result, float64 or float32.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    a, classes = annotations, annotations.num_classes
    gold = None if gold is None else as_gold(gold, a, classes)
    check_options(a, classes, gold, None, 0.0, dtype)
    weights = _weights(a, strength, annotator_weight, item_weight)
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, got {steps}")
    model = _Model(a, weights, None if gold is None else gold.to(a.device), dtype)
    negated, converged = iterate(
        lambda: model.maximise(steps), lambda: -model.expect(), max_iterations, tolerance * model.total
    )
    confusion = model.competence[..., 0].softmax(2)
    say_collapse(model.posterior, a, "mmce")
    return MMCEResult(model.posterior, confusion, [-value for value in negated], converged)


class _Model:
    """`posterior` [N, C], `competence` σ [R, C, K, 1] and `difficulty` τ [N, C, K, 1]."""

    def __init__(
        self, annotations: Annotations, weights: tuple[float, float], gold: Tensor | None, dtype: torch.dtype
    ) -> None:
        self.annotations, self.weights, classes = annotations, weights, annotations.num_classes
        device = annotations.device
        self.weight, self.total = weights_of(annotations, dtype)
        sizes = (annotations.num_annotators, len(annotations))
        self.competence, self.difficulty = (
            torch.zeros(size, classes, classes, 1, dtype=dtype, device=device) for size in sizes
        )
        prior = torch.full((len(annotations), classes), -math.log(max(classes, 1)), dtype=dtype, device=device)
        self.log_prior = prior if gold is None else prior.where(possible(gold, classes), -math.inf)
        # a known class may have no votes: it is known by the prior, weighed by the little that votes leave
        votes = vote_proportions(annotations, classes).to(dtype) + torch.finfo(dtype).tiny
        self.posterior = (votes.log() + self.log_prior).softmax(1)

    def evidence(self, competence: Tensor, difficulty: Tensor) -> Tensor:
        """``[N, C]`` log-probability of each item's labels under each class."""
        rows = pair_confusion(difficulty, competence, self.annotations)
        return segment_sum(rows if self.weight is None else rows * self.weight.unsqueeze(1), self.annotations)

    def penalty(self, competence: Tensor, difficulty: Tensor) -> Tensor:
        """The regulariser."""
        alpha, beta = self.weights
        return 0.5 * (alpha * competence.square().sum() + beta * difficulty.square().sum())

    def maximise(self, steps: int) -> None:
        """σ and τ given the posterior."""
        if self.competence.numel() + self.difficulty.numel() == 0:
            return
        with torch.enable_grad():
            parameters = [self.competence.clone().requires_grad_(), self.difficulty.clone().requires_grad_()]
            optimizer = torch.optim.LBFGS(parameters, max_iter=steps, line_search_fn="strong_wolfe")

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.penalty(*parameters) - (self.posterior * self.evidence(*parameters)).sum()
                loss.backward()
                return loss

            optimizer.step(closure)
        self.competence, self.difficulty = (parameter.detach() for parameter in parameters)

    def expect(self) -> float:
        """The posterior given σ and τ; returns the objective."""
        joint = self.log_prior + self.evidence(self.competence, self.difficulty)
        self.posterior = joint.softmax(1)
        return float(self.penalty(self.competence, self.difficulty) - joint.logsumexp(1).sum())


def _weights(
    annotations: Annotations, strength: float, annotator_weight: float | None, item_weight: float | None
) -> tuple[float, float]:
    for name, value in (("strength", strength), ("annotator_weight", annotator_weight), ("item_weight", item_weight)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0, got {value}: without it the difficulties explain every label")
    alpha = strength * annotations.num_classes**2 if annotator_weight is None else annotator_weight
    if item_weight is not None:
        return alpha, item_weight
    answered = int((annotations.counts > 0).sum())
    gave = int((torch.bincount(annotations.annotator, minlength=1) > 0).sum())
    return alpha, alpha * max(answered, 1) / max(gave, 1)  # (nnz / R) / (nnz / N)
