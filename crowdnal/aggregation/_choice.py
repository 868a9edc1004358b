"""Which aggregation method suits a crowd: the one that foresees labels it has not seen, if it does so better."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crowdnal._utils.options import check_amount, check_integer, typed
from crowdnal._utils.probability import proportions
from crowdnal.aggregation._communities import cbcc
from crowdnal.aggregation._dawid_skene import dawid_skene
from crowdnal.aggregation._one_coin import one_coin
from crowdnal.aggregation._votes import vote_proportions
from crowdnal.aggregation.em import AggregationResult, check_options, crowd_confusion, standard_errors, weights_of
from crowdnal.data import Annotations

VOTES = "majority-vote"


@dataclass
class Choice(AggregationResult):
    """What `choose` found.

    Attributes:
        posterior: ``[N, C]`` of the chosen method on all annotations, rows sum to 1.
        confusion: ``[R, C, K]`` of that method, rows = true class, rows sum to 1.
        method: a key of ``CANDIDATES``.
        log_likelihood: of each candidate, the mean log-probability of labels that it had not seen; 0 where there
            are none to compare.
        why: the reason, as a sentence.
    """

    posterior: Tensor
    confusion: Tensor
    method: str
    log_likelihood: dict[str, float]
    why: str


def _votes(annotations: Annotations) -> tuple[Tensor, Tensor]:
    """The votes, and one confusion for everybody."""
    posterior = vote_proportions(annotations, annotations.num_classes)
    weight, _ = weights_of(annotations, posterior.dtype)
    crowd = crowd_confusion(posterior, annotations, weight, annotations.counts > 0)
    if crowd is None:  # nobody gave a label
        crowd = proportions(posterior.new_zeros(2 * (annotations.num_classes,)), 1)
    return posterior, crowd.expand(annotations.num_annotators, -1, -1)


def _of(method: Callable[[Annotations], Any]) -> Callable[[Annotations], tuple[Tensor, Tensor]]:
    def run(annotations: Annotations) -> tuple[Tensor, Tensor]:
        found = method(annotations)
        return found.posterior, found.confusion

    return run


CANDIDATES: dict[str, Callable[[Annotations], tuple[Tensor, Tensor]]] = {
    VOTES: _votes,
    "one-coin": _of(one_coin),
    "dawid-skene": _of(dawid_skene),
    "cbcc": _of(cbcc),
}
"""What :func:`choose` chooses among: posterior ``[N, C]`` and confusions ``[R, C, K]`` from annotations."""


@typed
@torch.no_grad()
def choose(annotations: Annotations, *, folds: int = 5, margin: float = 2.0, seed: int = 0) -> Choice:
    """The method whose model foresees held-out labels best, or the votes where none does so clearly better than they.

    The labels of items that have several are dealt into folds; each is foreseen from the others: a label y of
    annotator r on item i has the probability ``Σ_k q_i[k] A_r[k, y]``, with the votes and the crowd's confusion in
    the case of the votes. A method counts as better where the sum of the differences exceeds ``margin`` times its
    standard error.

    Args:
        annotations: the whole data set. Weights are those of the methods; the likelihood counts every label once.
        folds: 2 or more; the time is that of so many runs of every candidate, and one more.
        margin: standard errors, 0 or more.
        seed: of the folds.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    check_integer(2, folds=folds)
    check_amount(margin=margin)
    check_options(annotations, annotations.num_classes, None, None, 0.0, torch.float64)
    size = annotations.num_annotations
    several = (annotations.counts > 1)[annotations.item]  # a single label is foreseen from nothing
    fold = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).to(annotations.device) % folds
    fold = fold.where(several, -1)
    values = {name: torch.zeros(size, dtype=torch.float64, device=annotations.device) for name in CANDIDATES}
    for k in fold[several].unique().tolist():
        kept, held = annotations.select(fold != k), annotations.select(fold == k)
        for name, run in CANDIDATES.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a candidate that collapses, and foresees nothing
                posterior, confusion = run(kept)
            given = confusion[held.annotator, :, held.label]
            values[name][fold == k] = (posterior[held.item] * given).sum(1).clamp(min=1e-300).log()
    values = {name: value[several] for name, value in values.items()}
    size = int(several.sum())
    means = {name: float(value.mean()) if size else 0.0 for name, value in values.items()}
    best = max(means, key=lambda name: means[name])
    errors = standard_errors(values[best] - values[VOTES])
    if size == 0:
        best, why = VOTES, "no item has two labels, so that nothing tells how often labels are right"
    elif best == VOTES:
        why = "no model of the annotators foresees held-out labels better than the votes do"
    elif errors <= margin:
        why = f"{best} foresees held-out labels no better than the votes do, within {margin:g} standard errors"
        best = VOTES
    else:
        why = (
            f"{best} foresees held-out labels best: a mean log-probability of {means[best]:.3f} to the votes' "
            f"{means[VOTES]:.3f}, {errors:.1f} standard errors"
        )
    return Choice(*CANDIDATES[best](annotations), best, means, why)
