"""Simulated annotators: confusions, and labels drawn from them. Seeded, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from crowdnal.data import Annotations

__all__ = [
    "CommonAndIndividual",
    "common_and_individual",
    "hammer_spammer_confusions",
    "pair_flip_confusions",
    "simulate",
    "symmetric_confusions",
]

Seed = int | torch.Generator
ROUNDS = 30
BLOCK = 1 << 22


def symmetric_confusions(
    num_annotators: int, num_classes: int, accuracy: float | Sequence[float] | Tensor = 0.7
) -> Tensor:
    """``[R, C, C]``: right with probability ``accuracy`` (one, or one per annotator), else any other class."""
    right = _accuracies(num_annotators, num_classes, accuracy)
    wrong = (1 - right) / max(num_classes - 1, 1)
    eye = torch.eye(num_classes)
    return eye * right + (1 - eye) * wrong


def pair_flip_confusions(
    num_annotators: int,
    num_classes: int,
    accuracy: float | Sequence[float] | Tensor = 0.7,
    *,
    seed: Seed | None = 0,
) -> Tensor:
    """``[R, C, C]``: right with probability ``accuracy``, else always the same wrong class.

    Each annotator's wrong class for each true class is drawn uniformly (the pairwise flipper of Tanno et al.
    2019); ``seed=None`` takes the next class, for all annotators.
    """
    right = _accuracies(num_annotators, num_classes, accuracy)
    if num_classes == 1:
        return torch.ones(num_annotators, 1, 1)
    shape = (num_annotators, num_classes)
    if seed is None:
        shift = torch.ones(shape, dtype=torch.int64)
    else:
        shift = torch.randint(1, num_classes, shape, generator=generator_of(seed))
    target = (torch.arange(num_classes) + shift) % num_classes
    flip = torch.nn.functional.one_hot(target, num_classes)
    return torch.eye(num_classes) * right + flip * (1 - right)


def hammer_spammer_confusions(
    num_annotators: int, num_classes: int, hammers: float = 0.5, *, accuracy: float = 1.0, seed: Seed = 0
) -> Tensor:
    """``[R, C, C]``: hammers are right with probability ``accuracy``, spammers' rows are uniform.

    ``round(hammers * R)`` annotators, at random places, are hammers.
    """
    if not 0 <= hammers <= 1:
        raise ValueError(f"hammers is a share of the annotators in [0, 1], got {hammers}")
    confusions = symmetric_confusions(num_annotators, num_classes, accuracy)
    place = torch.randperm(num_annotators, generator=generator_of(seed))
    confusions[place[round(hammers * num_annotators) :]] = 1 / num_classes
    return confusions


def simulate(
    truth: Any,
    confusions: Any,
    *,
    annotations_per_item: int | Sequence[int] | Tensor = 3,
    selection: Any = None,
    seed: Seed = 0,
) -> Annotations:
    """Draw annotators for each item, without replacement, and a label from each one's confusion.

    Neither ``N x R`` nor ``nnz x K`` numbers are made unless an item's annotators are a large part of R.

    Args:
        truth: ``[N]`` true classes.
        confusions: ``[R, C, K]``, rows sum to 1.
        annotations_per_item: how many, for all items or ``[N]``.
        selection: ``[R]`` weights: annotators are drawn one after the other with these odds. Default: equal.
        seed: of the draws, or a generator.

    Returns:
        Annotations of the N items, annotators ascending within each.

    Raises:
        ValueError: naming the item, the annotator or the row of confusions.
    """
    truth, confusions = torch.as_tensor(truth).cpu(), torch.as_tensor(confusions).detach().cpu().double()
    if confusions.ndim != 3 or 0 in confusions.shape:
        raise ValueError(f"confusions must be [R, C, K], got {list(confusions.shape)}")
    annotators, classes, labels = confusions.shape
    bad = ~((confusions >= 0).all(2) & ((confusions.sum(2) - 1).abs() < 1e-4))
    if bool(bad.any()):
        r, c = bad.nonzero()[0].tolist()
        raise ValueError(f"confusions[{r}, {c}] is no distribution: divide each row by its sum")
    if truth.ndim != 1 or truth.is_floating_point():
        raise ValueError(f"truth must be [N] integers, got {truth.dtype} {list(truth.shape)}")
    _check("truth", truth, (truth < 0) | (truth >= classes), f"classes are 0 to {classes - 1}")
    weights = torch.ones(annotators) if selection is None else torch.as_tensor(selection).cpu()
    weights = weights.double()
    if weights.shape != (annotators,):
        raise ValueError(f"selection must be [{annotators}], one weight per annotator, got {list(weights.shape)}")
    _check("selection", weights, ~(weights >= 0) | weights.isinf(), "weights are finite and not negative")
    counts = torch.as_tensor(annotations_per_item).cpu()
    if counts.is_floating_point() or (counts.ndim != 0 and counts.shape != truth.shape):
        raise ValueError(
            f"annotations_per_item must be an integer or [{len(truth)}] integers, got {counts.dtype} "
            f"{list(counts.shape)}"
        )
    counts = counts.long().expand(len(truth))
    able = int((weights > 0).sum())
    fix = f"an item can have 0 to {able} annotations, one from each annotator that may be selected"
    _check("annotations_per_item", counts, (counts < 0) | (counts > able), fix)

    generator = generator_of(seed)
    item, annotator = _choose(counts, weights, generator)
    row = annotator * classes + truth.long()[item]
    steps = confusions.cumsum(2)
    steps = (steps / steps[..., -1:]).view(-1, labels) + torch.arange(annotators * classes)[:, None]
    # One search in all rows at once. A float32 draw plus a row number is exact in float64, so no draw can
    # round up into the next row or onto a label of probability 0.
    draw = row + torch.rand(len(row), generator=generator, dtype=torch.float32).double()
    label = torch.searchsorted(steps.view(-1), draw, right=True) - row * labels
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return Annotations(
        indptr,
        annotator,
        label,
        num_annotators=annotators,
        num_classes=labels,
        item_id=torch.arange(len(truth)),
    )


class CommonAndIndividual(NamedTuple):
    """What :func:`common_and_individual` made.

    Attributes:
        annotations: of the N items by R annotators.
        common: ``[C, C]`` confusion that all annotators share.
        individual: ``[R, C, C]`` their own.
        source: ``[nnz]``, True where the label was drawn from the common confusion.
        omega: ``[nnz]`` probability of that.
    """

    annotations: Annotations
    common: Tensor
    individual: Tensor
    source: Tensor
    omega: Tensor


def common_and_individual(
    truth: Any,
    features: Any,
    num_annotators: int = 30,
    num_classes: int | None = None,
    *,
    pattern: Literal["asymmetric", "symmetric"] = "asymmetric",
    common_strength: float = 0.4,
    individual_strength: float = 0.7,
    proportion: float = 0.5,
    contrast: float = 1.0,
    embedding_dim: int = 20,
    annotations_per_item: int | Sequence[int] | Tensor = 3,
    seed: Seed = 0,
) -> CommonAndIndividual:
    """Labels of which each comes from a confusion that all annotators share or from its annotator's own (Chu 2021).

    A confusion is right with probability 1 - strength, else it gives one wrong class. With probability
    ``omega = sigmoid(contrast u_r . v_i + b)`` a label is drawn from the common one; u and v are normalised random
    linear maps of hidden annotator features and of the items' features (their equation 3), and b makes the mean of
    omega over the annotations ``proportion``.

    Args:
        truth: ``[N]`` true classes.
        features: ``[N, D]`` of the items.
        num_annotators: R.
        num_classes: C; default the largest of ``truth``, plus 1.
        pattern: of the common confusion: ``"asymmetric"``, the wrong class of each class is drawn uniformly, or
            ``"symmetric"``, classes are paired at random and swapped (of an odd number one stays right). The
            individual ones are asymmetric.
        common_strength: probability of the wrong class; the paper has 0.4 to 0.8.
        individual_strength: the same, 0.7 in the paper.
        proportion: of labels from the common confusion, 0 (there is none) to 1; the paper has 0 and 0.3 to 0.7.
        contrast: 1 as in the paper hardly tells annotations apart: with 20 dimensions omega varies by 0.05. Larger
            ones do.
        embedding_dim: length of u, v and the hidden annotator features.
        annotations_per_item: how many, for all items or ``[N]``.
        seed: of all draws, or a generator.

    Raises:
        ValueError: naming the argument.
    """
    if pattern not in ("asymmetric", "symmetric"):
        raise ValueError(f"pattern={pattern!r} is unknown: use 'asymmetric' or 'symmetric'")
    shares = {
        "common_strength": common_strength, "individual_strength": individual_strength, "proportion": proportion,
    }  # fmt: skip
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise ValueError(f"{name} is a probability in [0, 1], got {share}")
    truth, items = torch.as_tensor(truth).cpu(), torch.as_tensor(features).detach().cpu().double()
    if items.ndim != 2 or len(items) != len(truth):
        raise ValueError(f"features must be [N, D] with N={len(truth)} as truth, got {list(items.shape)}")
    if num_classes is None:
        num_classes = int(truth.max()) + 1 if len(truth) else 1
    generator = generator_of(seed)
    if pattern == "symmetric":
        common = _swapped(num_classes, 1 - common_strength, generator)
    else:
        common = pair_flip_confusions(1, num_classes, 1 - common_strength, seed=generator)[0]
    individual = pair_flip_confusions(num_annotators, num_classes, 1 - individual_strength, seed=generator)
    own = simulate(truth, individual, annotations_per_item=annotations_per_item, seed=generator)
    shared = simulate(truth[own.item], common[None], annotations_per_item=1, seed=generator).label

    people = torch.randn(num_annotators, embedding_dim, generator=generator, dtype=torch.float64)
    u, v = (
        torch.nn.functional.normalize(
            x @ torch.randn(x.shape[1], embedding_dim, generator=generator, dtype=torch.float64)
        )
        for x in (people, items)
    )
    logits = contrast * (u[own.annotator] * v[own.item]).sum(1)
    omega = (logits + _offset(logits, proportion)).sigmoid()
    source = torch.rand(len(omega), generator=generator, dtype=torch.float64) < omega
    annotations = Annotations(
        own.indptr,
        own.annotator,
        torch.where(source, shared, own.label),
        num_annotators=num_annotators,
        num_classes=num_classes,
        item_id=own.item_id,
    )
    return CommonAndIndividual(annotations, common, individual, source, omega)


def _swapped(num_classes: int, right: float, generator: torch.Generator) -> Tensor:
    """``[C, C]``: random pairs of classes that are taken for each other with probability 1 - right."""
    order = torch.randperm(num_classes, generator=generator)
    partner = torch.arange(num_classes)
    first, second = order[: num_classes // 2 * 2].view(-1, 2).unbind(1)
    partner[first], partner[second] = second, first
    return torch.eye(num_classes) * right + torch.nn.functional.one_hot(partner, num_classes) * (1 - right)


def _offset(logits: Tensor, proportion: float) -> Tensor:
    """b such that the mean of sigmoid(logits + b) is ``proportion``."""
    if proportion in (0, 1) or len(logits) == 0:
        return torch.tensor(-torch.inf if proportion == 0 else torch.inf, dtype=logits.dtype)
    centre = torch.logit(torch.tensor(proportion, dtype=logits.dtype))
    low, high = centre - logits.max(), centre - logits.min()
    for _ in range(60):
        middle = (low + high) / 2
        above = (logits + middle).sigmoid().mean() > proportion
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return (low + high) / 2


def _choose(counts: Tensor, weights: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """For each item ``counts [N]`` different annotators with odds ``weights [R]``: items, annotators, sorted.

    Draws that repeat are drawn again, which is what drawing without replacement means. Where that would take
    long, the rest comes from a race: the smallest of exponential times with rates ``weights``.
    """
    size = len(weights)
    odds = weights.cumsum(0)
    odds = odds / odds[-1].clamp(min=torch.finfo(torch.float64).tiny)
    few = counts * 4 <= size
    key = torch.empty(0, dtype=torch.int64)
    for _ in range(ROUNDS):
        lacking = torch.where(few, counts - torch.bincount(key // size, minlength=len(counts)), 0)
        item = torch.repeat_interleave(torch.arange(len(counts)), lacking)
        if len(item) == 0:
            break
        draw = torch.rand(len(item), generator=generator, dtype=torch.float64)
        key = torch.cat([key, item * size + torch.searchsorted(odds, draw, right=True)]).unique()
    lacking = counts - torch.bincount(key // size, minlength=len(counts))
    keys = [key]
    for items in lacking.nonzero()[:, 0].split(max(BLOCK // size, 1)):
        if len(items) == 0:
            continue
        time = torch.empty(len(items), size, dtype=torch.float64).exponential_(generator=generator)
        time = torch.where(weights > 0, time / weights, torch.inf)
        first, last = torch.searchsorted(key, torch.stack([items[0], items[-1] + 1]) * size).tolist()
        mine = key[first:last]
        mine = mine[lacking[mine // size] > 0]
        time[torch.searchsorted(items, mine // size), mine % size] = torch.inf
        wanted = lacking[items]
        fastest = time.topk(int(wanted.max()), largest=False).indices
        inside = torch.arange(fastest.shape[1]) < wanted[:, None]
        keys.append((items[:, None] * size + fastest)[inside])
    key = torch.cat(keys).sort().values
    return key // size, key % size


def generator_of(seed: Seed) -> torch.Generator:
    return seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)


def _accuracies(num_annotators: int, num_classes: int, accuracy: float | Sequence[float] | Tensor) -> Tensor:
    """``[R, 1, 1]``."""
    if num_annotators < 1 or num_classes < 1:
        raise ValueError(f"num_annotators and num_classes must be 1 or more, got {num_annotators} and {num_classes}")
    right = torch.as_tensor(accuracy, dtype=torch.get_default_dtype())
    if right.ndim > 1 or (right.ndim == 1 and len(right) != num_annotators):
        raise ValueError(f"accuracy must be a number or [{num_annotators}], got {list(right.shape)}")
    right = right.expand(num_annotators)
    _check("accuracy", right, ~((right >= 0) & (right <= 1)), "accuracies are in [0, 1]")
    if num_classes == 1:
        right = torch.ones_like(right)
    return right[:, None, None]


def _check(name: str, values: Tensor, bad: Tensor, fix: str) -> None:
    if bool(bad.any()):
        i = int(bad.nonzero()[0, 0])
        raise ValueError(f"{name}[{i}] is {values[i].item()}: {fix}")
