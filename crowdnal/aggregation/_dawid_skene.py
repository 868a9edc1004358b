"""Dawid-Skene: true labels and annotators' confusions from annotations alone, by EM on the joint link."""

from __future__ import annotations

import torch
from torch import Tensor

from crowdnal.aggregation._em import DawidSkeneResult, EMState, run
from crowdnal.data import Annotations

__all__ = ["DawidSkeneResult", "dawid_skene"]


@torch.no_grad()
def dawid_skene(
    annotations: Annotations,
    *,
    max_iterations: int = 100,
    tolerance: float = 1e-5,
    smoothing: float = 0.0,
    gold: Tensor | None = None,
    initial_confusion: Tensor | None = None,
    confusion_prior: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> DawidSkeneResult:
    """Maximum likelihood, or maximum a posteriori, of the model of Dawid & Skene (1979).

    Starts from the shares of the votes (the paper's eq. 3.1) and alternates M-step (eq. 2.3 and 2.4) and E-step
    (eq. 2.5), all items at once, in log space and with every sum in a fixed order. A label that an annotator never
    gave has probability 0; one that they gave, but never to a class, counts 1e-10 there: so the row of a class that an
    annotator never met is uniform over their labels, and that of an annotator without annotations over all labels. A
    class without a single vote stays impossible.

    Args:
        annotations: the whole data set. A weight says how often its annotation counts.
        max_iterations: of an M-step and an E-step each, 1 or more.
        tolerance: stop when the objective rises by less than this per annotation; a negative one never stops.
        smoothing: pseudo-count added to every cell of every confusion.
        gold: ``[N]`` integers, known true classes, -1 where unknown. They hold throughout.
        initial_confusion: ``[R, C, K]``, **start only**: the first iteration is an E-step with it instead of the votes.
            It alone allows C != K.
        confusion_prior: ``[C, K]`` or ``[R, C, K]`` pseudo-counts, **held** in every M-step (a Dirichlet prior with
            these numbers plus 1).
        dtype: of the computation and the result, float64 or float32.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    em = EMState(annotations, gold, initial_confusion, confusion_prior, smoothing, dtype)
    return run(em, max_iterations, tolerance, start_given=initial_confusion is not None)
