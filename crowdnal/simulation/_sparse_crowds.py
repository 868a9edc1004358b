"""Sparse annotators of the kinds of Zhang et al., Coupled Confusion Correction, AAAI 2024 (appendix, Table 4)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from crowdnal.data import Annotations
from crowdnal.simulation._simulate import Seed, generator_of, pair_flip_confusions, simulate, symmetric_confusions

__all__ = ["SETTINGS", "SparseCrowd", "sparse_crowd"]

Pattern = tuple[str, float | tuple[int, ...] | None]
_SOME, _MANY = (0, 6, 8), (1, 3, 4, 6, 8)
SETTINGS: dict[str, tuple[Pattern, ...]] = {
    "IND-I": (("sym", 0.3), ("sym", 0.5), ("pair", 0.6), ("class", _MANY), ("dummy", None)),
    "IND-II": (("sym", 0.4), ("class", (2, 5, 9)), ("pair", 0.6), ("class", _SOME), ("dummy", None)),
    "IND-III": (("pair", 0.3), ("pair", 0.6), ("class", (0, 4, 5)), ("class", _MANY), ("dummy", None)),
    "IND-IV": (("sym", 0.3), ("sym", 0.5), ("sym", 0.7), ("pair", 0.5), ("pair", 0.3)),
    "COR-I": (("sym", 0.4), ("class", (2, 5, 9)), ("dummy", None), ("supp", None), ("oppo", None)),
    "COR-II": (("pair", 0.5), ("class", _SOME), ("supp", None), ("oppo", None), ("copy", None)),
    "COR-III": (("pair", 0.4), ("sym", 0.5), ("oppo", None), ("supp", None), ("copy", None)),
    "COR-IV": (("sym", 0.5), ("pair", 0.7), ("pair", 0.3), ("oppo", None), ("supp", None)),
}
"""The patterns of each setting; a fifth of the annotators has each, in this order."""
ALPHA, BETA = 1.5, 3.0  # of the annotators' odds to be selected


class SparseCrowd(NamedTuple):
    """What :func:`sparse_crowd` draws.

    ``confusions [R, C, C]`` are what annotators do on the whole (of one who looks at another, given whom);
    ``looks_at [R]`` says whom a correlated annotator looks at, -1 for an independent one.
    """

    annotations: Annotations
    confusions: Tensor
    looks_at: Tensor


def sparse_crowd(
    truth: Any,
    setting: str,
    *,
    num_annotators: int = 250,
    annotations_per_item: int = 3,
    num_classes: int = 10,
    seed: Seed = 0,
) -> SparseCrowd:
    """Everyone labels every item; each item keeps a few annotators, drawn with odds from Beta(1.5, 3).

    ============= ============================================================================
    pattern       label
    ============= ============================================================================
    sym ε         right with probability 1 - ε, else any other class
    pair ε        right with probability 1 - ε, else one other class
    class c, ...  right for the named classes, any class for the others
    dummy         any class
    copy          that of another annotator
    supp          right where another annotator is right, else any class
    oppo          right where another annotator is wrong, else any class
    ============= ============================================================================

    The paper leaves open, and here: pair's other class is the next one; the other annotator is one for all items, drawn
    from those of the patterns before (so that nobody looks at themselves by detours), whether or not that one is kept
    for an item; an annotator's odds are the same for all items, and those of an item are drawn without replacement.
    Works on ``N x R`` labels.

    Args:
        truth: ``[N]`` true classes.
        setting: a key of ``SETTINGS``.
        num_annotators: R, a multiple of 5.
        annotations_per_item: 0 to R.
        num_classes: C, 9 or more where a pattern names the class 8, 10 where it names 9.
        seed: of all draws, or a generator.

    Raises:
        ValueError: an argument is out of its range.
    """
    patterns = _checked(setting, num_annotators, num_classes)
    truth = torch.as_tensor(truth).cpu()
    generator = generator_of(seed)
    each = num_annotators // len(patterns)
    labels: list[Tensor] = []
    confusions: list[Tensor] = []
    looks_at = torch.full((num_annotators,), -1)
    for place, (kind, value) in enumerate(patterns):
        if kind in ("copy", "supp", "oppo"):
            seen = torch.randint(place * each, (each,), generator=generator)
            looks_at[place * each : (place + 1) * each] = seen
            theirs, known = torch.cat(labels, 1)[:, seen], torch.cat(confusions)[seen]
            labels.append(theirs if kind == "copy" else _answer(kind, theirs, truth, num_classes, generator))
            confusions.append(known if kind == "copy" else _expected(kind, known))
        else:
            confusions.append(_independent(kind, value, num_classes).expand(each, num_classes, num_classes))
            full = simulate(truth, confusions[-1], annotations_per_item=each, seed=generator)
            labels.append(full.to_dense())
    odds = _beta(num_annotators, generator)
    kept = simulate(
        torch.zeros_like(truth),
        torch.ones(num_annotators, 1, 1),
        annotations_per_item=annotations_per_item,
        selection=odds,
        seed=generator,
    ).to_dense()
    dense = torch.where(kept == 0, torch.cat(labels, 1), -1)
    return SparseCrowd(Annotations.from_dense(dense, num_classes=num_classes), torch.cat(confusions), looks_at)


def _checked(setting: str, num_annotators: int, num_classes: int) -> tuple[Pattern, ...]:
    if setting not in SETTINGS:
        raise ValueError(f"setting={setting!r} is unknown: use one of {', '.join(SETTINGS)}")
    patterns = SETTINGS[setting]
    if num_annotators < 1 or num_annotators % len(patterns):
        raise ValueError(f"num_annotators={num_annotators} must be a multiple of {len(patterns)}, as many of a pattern")
    needed = max((max(value) + 1 for _, value in patterns if isinstance(value, tuple)), default=2)
    if num_classes < needed:
        raise ValueError(f"num_classes={num_classes} must be {needed} or more for {setting}")
    return patterns


def _independent(kind: str, value: float | tuple[int, ...] | None, num_classes: int) -> Tensor:
    """``[C, C]``."""
    if isinstance(value, float):
        if kind == "sym":
            return symmetric_confusions(1, num_classes, 1 - value)[0]
        return pair_flip_confusions(1, num_classes, 1 - value, seed=None)[0]
    matrix = torch.full((num_classes, num_classes), 1 / num_classes)
    known = [] if value is None else list(value)
    matrix[known] = torch.eye(num_classes)[known]
    return matrix


def _answer(kind: str, theirs: Tensor, truth: Tensor, num_classes: int, generator: torch.Generator) -> Tensor:
    """``[N, each]`` of who is right where the others are (``supp``) or where they are not."""
    right = theirs == truth.unsqueeze(1)
    anything = torch.randint(num_classes, right.shape, generator=generator)
    return torch.where(right if kind == "supp" else ~right, truth.unsqueeze(1), anything)


def _expected(kind: str, theirs: Tensor) -> Tensor:
    right = theirs.diagonal(dim1=1, dim2=2)
    right = (right if kind == "supp" else 1 - right).unsqueeze(2)
    return right * torch.eye(theirs.shape[1]) + (1 - right) / theirs.shape[1]


def _beta(size: int, generator: torch.Generator) -> Tensor:
    """Draws of Beta(1.5, 3)."""
    x, y = (
        torch._standard_gamma(torch.full((size,), shape, dtype=torch.float64), generator=generator)
        for shape in (ALPHA, BETA)
    )
    return x / (x + y)
