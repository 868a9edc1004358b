"""`Annotations` as batches: joined, collated, made of a dense tensor, without the answers that name no class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data._utils.collate import collate as _collate
from torch.utils.data._utils.collate import default_collate_fn_map

from crowdnal.data import _select
from crowdnal.data.annotations import Annotations

__all__ = ["as_annotations", "collate", "concat", "of_classes"]


def concat(pieces: Sequence[Annotations]) -> Annotations:
    """All items of all pieces, in order, as one.

    Pieces with the same annotator and class ids but other items get one vocabulary with the items of all.

    Raises:
        ValueError: if there is no piece, or pieces differ in R, K, annotator ids or class ids.
    """
    if len(pieces) == 0:
        raise ValueError("pieces is empty; concat needs at least one Annotations")
    for p, piece in enumerate(pieces):
        if not isinstance(piece, Annotations):
            raise ValueError(f"pieces[{p}] is {type(piece).__name__}; concat joins Annotations")
    return pieces[0].trusted(_select.concat([piece.fields for piece in pieces]))


def _collate_annotations(batch: Sequence[Annotations], *, collate_fn_map: Any = None) -> Annotations:
    return concat(batch).prepare()


def collate(batch: Sequence[Any]) -> Any:
    """A DataLoader's ``collate_fn``: torch's default one, with Annotations concatenated and prepared."""
    return _collate(batch, collate_fn_map={Annotations: _collate_annotations, **default_collate_fn_map})


def as_annotations(
    targets: Annotations | Tensor, *, num_annotators: int, num_classes: int, missing: int = -1
) -> Annotations:
    """Targets of a loss: Annotations pass through, dense ``[B, R]`` labels, or soft ``[B, R, K]`` ones, are converted.

    Raises:
        ValueError: if R or K are not those expected.
    """
    if isinstance(targets, Annotations):
        if targets.num_annotators != num_annotators or targets.num_classes != num_classes:
            raise ValueError(
                f"annotations have {targets.num_annotators} annotators and {targets.num_classes} classes, "
                f"expected are {num_annotators} and {num_classes}; give the objective the sizes of the whole "
                "data set, or read the annotations with annotators= and classes="
            )
        return targets
    shapes = (num_annotators,), (num_annotators, num_classes)
    if not isinstance(targets, Tensor) or tuple(targets.shape[1:]) not in shapes:
        got = list(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
        raise ValueError(
            f"targets must be Annotations or a tensor [B, {num_annotators}] with {missing} where there is no "
            f"label, or of probabilities [B, {num_annotators}, {num_classes}]; got {got}"
        )
    return Annotations.from_dense(targets, num_classes=num_classes, missing=missing)


def of_classes(annotations: Annotations, num_classes: int) -> Annotations:
    """The labels that name a class: answers such as "unsure", which are numbered behind the classes, are left out."""
    if annotations.num_classes <= num_classes:
        return annotations
    kept = annotations.select(annotations.label < num_classes)
    return Annotations.trusted(kept.fields._replace(num_classes=num_classes, vocabulary=None))
