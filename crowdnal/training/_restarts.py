"""EM climbs to the nearest top: train from several random inits, keep the one of the highest likelihood."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from crowdnal.objectives import RoundsObjective
from crowdnal.training._model import CrowdModel


class Restarts(NamedTuple):
    """What :func:`best_of_restarts` found.

    Attributes:
        model: of the best run; the others are not kept.
        seed: of that run.
        log_likelihoods: of every run, in order: that of its last round.
    """

    model: CrowdModel
    seed: int
    log_likelihoods: list[float]


def best_of_restarts(train: Callable[[int], CrowdModel], restarts: int = 20, *, seed: int = 0) -> Restarts:
    """Trains with ``restarts`` seeds and keeps the model whose last round had the highest log-likelihood.

    No clean label is used. Of equal runs the first is kept.

        def train(seed):
            torch.manual_seed(seed)
            model = crowdnal.attach(network(), crowdnal.CMM(8, 59, seed=seed))
            ...  # the usual loop, with crowdnal.ObjectiveCallback
            return model

        model, seed, log_likelihoods = crowdnal.best_of_restarts(train, 20)

    Args:
        train: makes and trains a new model; its objective must be EM-style (CMM, DL-EM and the like).
        restarts: 1 or more; the paper on CMM has 20.
        seed: of the first run, then one more for each.

    Raises:
        ValueError: a run's model has made no round.
    """
    if restarts < 1:
        raise ValueError(f"restarts={restarts!r} must be 1 or more")
    best: tuple[CrowdModel, int] | None = None
    likelihoods: list[float] = []
    for number in range(seed, seed + restarts):
        model = train(number)
        objective = model.objective
        if not isinstance(objective, RoundsObjective) or not objective.history:
            raise ValueError(
                f"the model of train({number}) has made no round ({type(objective).__name__}): use an EM-style "
                "objective, and call its hooks (crowdnal.ObjectiveCallback) for two epochs at least"
            )
        likelihood = objective.history[-1].log_likelihood
        if best is None or likelihood > max(likelihoods):
            best = model, number
        likelihoods.append(likelihood)
    assert best is not None
    return Restarts(*best, likelihoods)
