"""The pair confusion: fakes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from crowdnal import reference
from crowdnal.ops._declare import declare


@declare(reference.pair_confusion, shapes="difficulty:BCKL competence:RCKL", matrices=("difficulty", "competence"))
def pair_confusion(a: Any) -> tuple[Tensor, Tensor]:
    """log_q and log_norm, both [nnz, C]."""
    sizes = a.nnz, a.competence.shape[1]
    return reference.new_empty(a.competence, *sizes), reference.new_empty(a.competence, *sizes)


@declare(
    reference.pair_confusion_backward,
    shapes="grad:NC difficulty:BCKL competence:RCKL log_q:NC log_norm:NC",
    matrices=("difficulty", "competence"),
)
def pair_confusion_backward(a: Any) -> tuple[Tensor, Tensor]:
    """Gradients of difficulty and competence; 0 rows where not needed."""
    num_annotators, *sizes = a.competence.shape
    return (
        a.grad.new_empty(a.num_items if a.need_difficulty else 0, *sizes),
        a.grad.new_empty(num_annotators if a.need_competence else 0, *sizes),
    )
