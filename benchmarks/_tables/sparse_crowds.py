"""The sparse annotators of Zhang et al. 2024 (appendix, Table 4): five patterns, a fifth of the annotators each."""

from __future__ import annotations

import torch
from torch import Tensor

import crowdnal
from crowdnal import simulation

CLASSES = 10
Pattern = tuple[str, float | tuple[int, ...]]
# supportive and opposite annotators look at the answers of one of the others
SETS: dict[str, list[Pattern]] = {
    "IND-I": [("sym", 0.3), ("sym", 0.5), ("pair", 0.6), ("class", (1, 3, 4, 6, 8)), ("dummy", 0.0)],
    "COR-I": [("sym", 0.4), ("class", (2, 5, 9)), ("dummy", 0.0), ("supp", 0.0), ("oppo", 0.0)],
}
ALPHA, BETA = 1.5, 3.0


def annotate(truth: Tensor, patterns: str, annotators: int, per_item: int, seed: int) -> crowdnal.Annotations:
    """Every annotator answers every item, then each item keeps ``per_item``, chosen with odds from Beta(1.5, 3).

    Args:
        truth: ``[N]`` classes.
        patterns: a key of ``SETS``.
        annotators: R, a multiple of 5.
        per_item: annotations of an item.
        seed: of all draws.
    """
    generator = torch.Generator().manual_seed(seed)
    each = annotators // len(SETS[patterns])
    answers: list[Tensor] = []
    for kind, value in SETS[patterns]:
        if kind in ("supp", "oppo"):
            seen = torch.randint(len(answers) * each, (each,), generator=generator)  # everyone looks at one other
            right = torch.cat(answers, 1)[:, seen] == truth.unsqueeze(1)
            wrong = torch.randint(CLASSES, right.shape, generator=generator)
            right = right if kind == "supp" else ~right
            answers.append(torch.where(right, truth.unsqueeze(1), wrong))
        else:
            confusions = confusion(kind, value).expand(each, CLASSES, CLASSES)
            full = simulation.simulate(truth, confusions, annotations_per_item=each, seed=generator)
            answers.append(full.to_dense())
    odds = beta(annotators, generator)
    kept = simulation.simulate(
        torch.zeros_like(truth),
        torch.ones(annotators, 1, 1),
        annotations_per_item=per_item,
        selection=odds,
        seed=generator,
    ).to_dense()
    return crowdnal.Annotations.from_dense(torch.where(kept == 0, torch.cat(answers, 1), -1), num_classes=CLASSES)


def beta(size: int, generator: torch.Generator) -> Tensor:
    """Draws of Beta(1.5, 3)."""
    x, y = (
        torch._standard_gamma(torch.full((size,), shape, dtype=torch.float64), generator=generator)
        for shape in (ALPHA, BETA)
    )
    return x / (x + y)


def confusion(kind: str, value: float | tuple[int, ...]) -> Tensor:
    """``[C, C]`` of an independent pattern."""
    if kind == "sym":
        assert isinstance(value, float)
        return simulation.symmetric_confusions(1, CLASSES, 1 - value)[0]
    if kind == "pair":
        assert isinstance(value, float)
        return simulation.pair_flip_confusions(1, CLASSES, 1 - value, seed=None)[0]
    matrix = torch.full((CLASSES, CLASSES), 1 / CLASSES)
    if kind == "class":
        assert isinstance(value, tuple)
        known = list(value)
        matrix[known] = torch.eye(CLASSES)[known]
    return matrix
