"""The EM variant of CoNAL: Chu, Ma & Wang, Learning from Crowds by Modeling Common Confusions, 2021, appendix B."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crowdnal._utils.options import typed
from crowdnal._utils.warn import warn
from crowdnal.aggregation.common_confusion import CommonConfusionEM, Omega
from crowdnal.aggregation.em import AggregationResult, iterate, say_collapse
from crowdnal.data import Annotations


@dataclass
class CoNALEMResult(AggregationResult):
    """What `conal_em` found.

    Attributes:
        posterior: ``[N, C]`` over true classes, rows sum to 1.
        common: ``[C, K]`` confusion that all annotators share, rows sum to 1.
        confusion: ``[R, C, K]`` their own.
        source: ``[nnz]`` probability of each annotation, given its label, to come from the common confusion.
        class_prior: ``[C]``; the mean posterior where ``log_prior`` was given.
        log_likelihood: of the annotations, after every iteration.
        converged: whether the last step was smaller than the tolerance.
    """

    posterior: Tensor
    common: Tensor
    confusion: Tensor
    source: Tensor
    class_prior: Tensor
    log_likelihood: list[float]
    converged: bool


@typed
@torch.no_grad()
def conal_em(
    annotations: Annotations,
    *,
    log_prior: Tensor | None = None,
    omega: Omega = "annotation",
    max_iterations: int = 100,
    tolerance: float = 1e-5,
    smoothing: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> CoNALEMResult:
    """True labels, common and individual confusions by EM, with the closed forms of the paper's M-step.

    A label of a true class c comes from ``omega common[c] + (1 - omega) confusion_r[c]``. The E-step is exact: it
    keeps the source given *each* class, so that the likelihood never falls (with ``smoothing=0``); the paper writes its
    source for one class. Then ``omega`` is the mean of the source, and the confusions are the expected proportions of
    the labels.

    Starts from the vote proportions and ``omega = 1/2``. To alternate with a classifier, as the paper does, train it
    on ``posterior`` and give its log-probabilities as ``log_prior`` to the next call.

    Args:
        annotations: the whole data set. A weight says how often its annotation counts.
        log_prior: ``[N, C]`` log-probabilities of a classifier, instead of a class prior; needed for C != K.
        omega: one for each ``"annotation"`` (the paper), which goes to 0 or 1 in the end as nothing else informs it, or
            one for each ``"annotator"``.
        max_iterations: 1 or more.
        tolerance: stop when the log-likelihood rises by less than this per annotation; a negative one never stops.
        smoothing: pseudo-count added to every cell of every confusion.
        dtype: of the computation and the result, float64 or float32.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    if log_prior is None and omega == "annotation" and annotations.num_annotations > 0:
        if not bool((annotations.counts > 1).any()):
            warn(
                "conal_em: no item has two labels, so that nothing tells how often labels are right, and omega of each "
                "annotation drifts: give omega='annotator' or log_prior, or use the votes"
            )
    em = CommonConfusionEM(annotations, log_prior, omega, smoothing, dtype)
    likelihoods, converged = iterate(em.maximise, em.expect, max_iterations, tolerance * em.total)
    say_collapse(em.posterior, annotations, "conal_em")
    return CoNALEMResult(
        em.posterior,
        em.common.t().contiguous(),
        em.own.transpose(1, 2).contiguous(),
        em.mean_source(),
        em.class_prior,
        likelihoods,
        converged,
    )
