"""One-coin Dawid-Skene: true labels and one number per annotator, how often they are right, by EM on the joint link."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from crowdnal._utils.options import typed
from crowdnal._utils.probability import proportions
from crowdnal.aggregation._dawid_skene import DawidSkeneResult, EMState, run
from crowdnal.aggregation.em import FLOOR, STRENGTHS, say_collapse
from crowdnal.data import Annotations


@typed
@torch.no_grad()
def one_coin(
    annotations: Annotations,
    *,
    max_iterations: int = 100,
    tolerance: float = 1e-5,
    smoothing: float = 0.0,
    gold: Any = None,
    initial_reliability: Tensor | None = None,
    reliability_prior: Tensor | float | None = STRENGTHS[-1],
    learn_class_prior: bool = False,
    dtype: torch.dtype = torch.float64,
) -> DawidSkeneResult:
    """Maximum a posteriori, or maximum likelihood, of the one-coin model (Zhang et al., JMLR 2016, section 2).

    An annotator gives the true class with probability s, whatever it is, and any other with ``(1 - s) / (C - 1)``. For
    annotators with few labels, whose confusions :func:`crowdnal.dawid_skene` cannot know. As in the paper every class
    that has votes is equally probable: a learnt class prior can take everything, where nothing else tells classes
    apart. Starts, stops and sums as Dawid-Skene does; the result's ``confusion`` has s on the diagonal of each
    annotator. One without labels guesses, as far as the prior goes.

    Args:
        annotations: the whole data set. A weight says how often its annotation counts.
        max_iterations: of an M-step and an E-step each, 1 or more.
        tolerance: stop when the objective rises by less than this per annotation; a negative one never stops.
        smoothing: pseudo-count added to the right labels and to the wrong ones of everyone.
        gold: known true classes, as :func:`crowdnal.data.as_gold` takes them. They hold throughout.
        initial_reliability: ``[R]`` in [0, 1], **init only**: the first iteration is an E-step with it instead of the
            votes.
        reliability_prior: ``[2]`` or ``[R, 2]`` pseudo-counts of right and wrong labels, **held** in every M-step (a
            Beta prior with these numbers plus 1); or a number: so many labels in the proportion in which the whole
            crowd agrees with the votes; or None, as in the paper.
        learn_class_prior: the mean posterior instead.
        dtype: of the computation and the result, float64 or float32.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    initial = None
    if initial_reliability is not None:
        initial = _matrices(_checked(initial_reliability, annotations).to(dtype), annotations.num_classes)
    em = _OneCoin(annotations, gold, initial, None, smoothing, dtype, learn_class_prior)
    if reliability_prior is not None and not isinstance(reliability_prior, Tensor):
        reliability_prior = em.crowd_prior(reliability_prior)
    em.pseudo_counts = _pseudo_counts(reliability_prior, smoothing, annotations, dtype)
    found = run(em, max_iterations, tolerance, initialised=initial is not None)
    say_collapse(found.posterior, annotations, "one_coin")
    return found


class _OneCoin(EMState):
    """`pseudo_counts` [1 or R, 2] of right and wrong labels."""

    def __init__(
        self,
        annotations: Annotations,
        gold: Any,
        initial: Tensor | None,
        prior: Tensor | None,
        smoothing: float,
        dtype: torch.dtype,
        learn_class_prior: bool,
    ) -> None:
        self.learn_class_prior = learn_class_prior
        super().__init__(annotations, gold, initial, prior, smoothing, dtype)

    def _mean_posterior(self) -> Tensor:
        found = super()._mean_posterior()
        return found if self.learn_class_prior else proportions((found > 0).to(found), 0)

    def crowd_prior(self, strength: float) -> Tensor:
        """``[2]``: so many labels, right and wrong as the whole crowd's are by the votes."""
        if not 0 <= strength < math.inf:
            raise ValueError(f"reliability_prior={strength!r} must be pseudo-counts, or their number: not negative")
        crowd = self._right_and_wrong().sum(0) + 1
        return strength * crowd / crowd.sum()

    def _right_and_wrong(self) -> Tensor:
        """Expected numbers of labels ``[R, 2]``."""
        right = self.counts.diagonal(dim1=1, dim2=2).sum(1)
        return torch.stack([right, (self.counts.sum((1, 2)) - right).clamp(min=0)], 1)

    def _log_confusion(self) -> Tensor:
        both = self._right_and_wrong()
        both = both if self.pseudo_counts is None else both + self.pseudo_counts
        total = both.sum(1)
        guess = 1 / max(self.counts.shape[1], 1)
        reliability = torch.where(total > 0, both[:, 0] / torch.where(total > 0, total, 1), guess)
        return _matrices(reliability, self.counts.shape[1]).log()

    def _log_density(self, pseudo_counts: Tensor) -> float:
        right = self.log_confusion.diagonal(dim1=1, dim2=2)[:, 0].exp()
        return float((pseudo_counts * torch.stack([right, (1 - right).clamp(min=FLOOR)], 1).log()).sum())


def _matrices(reliability: Tensor, classes: int) -> Tensor:
    """``[R, C, C]``, symmetric; with a single class, everyone is right."""
    if classes == 1:
        return torch.ones(len(reliability), 1, 1, dtype=reliability.dtype, device=reliability.device)
    right = reliability.clamp(FLOOR, 1 - FLOOR).view(-1, 1, 1)
    eye = torch.eye(classes, dtype=torch.bool, device=reliability.device)
    return torch.where(eye, right, (1 - right) / max(classes - 1, 1))


def _checked(reliability: Tensor, annotations: Annotations) -> Tensor:
    if reliability.shape != (annotations.num_annotators,):
        raise ValueError(
            f"initial_reliability has shape {tuple(reliability.shape)} but must be [R] with R = "
            f"{annotations.num_annotators}: one number for each annotator"
        )
    bad = ~((reliability >= 0) & (reliability <= 1))
    if bool(bad.any()):
        r = int(bad.nonzero()[0, 0])
        raise ValueError(f"initial_reliability[{r}] is {float(reliability[r])}, no probability; give numbers in [0, 1]")
    return reliability.to(annotations.device)


def _pseudo_counts(
    prior: Tensor | None, smoothing: float, annotations: Annotations, dtype: torch.dtype
) -> Tensor | None:
    if prior is None:
        given = torch.zeros(1, 2, dtype=dtype, device=annotations.device)
    elif tuple(prior.shape) not in ((2,), (annotations.num_annotators, 2)):
        raise ValueError(
            f"reliability_prior has shape {tuple(prior.shape)} but must be [2] (right, wrong) or one pair for each of "
            f"{annotations.num_annotators} annotators"
        )
    elif not bool(((prior >= 0) & prior.isfinite()).all()):
        raise ValueError("reliability_prior must hold pseudo-counts, finite and not negative")
    else:
        given = prior.to(annotations.device, dtype).expand(annotations.num_annotators, 2)
    return given + smoothing if prior is not None or smoothing > 0 else None
