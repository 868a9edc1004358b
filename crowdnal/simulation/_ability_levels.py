"""Simulated crowds with a few levels of ability: setups 1 and 2 of Mena & Ñanculef 2019. Seeded, on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crowdnal.data import Annotations
from crowdnal.metrics import empirical_confusion
from crowdnal.simulation._simulate import Seed, simulate

__all__ = ["AbilityLevels", "ability_levels", "perturbed_confusions"]


class AbilityLevels(NamedTuple):
    """What :func:`ability_levels` made.

    Attributes:
        annotations: of the N items by T annotators.
        groups: ``[T]`` level of each annotator.
        confusions: ``[M, C, K]`` of the levels.
    """

    annotations: Annotations
    groups: Tensor
    confusions: Tensor

    @property
    def confusion(self) -> Tensor:
        """``[T, C, K]`` of the annotators."""
        return self.confusions[self.groups]


def ability_levels(
    truth: Any,
    confusions: Any,
    group_probs: Sequence[float] | Tensor,
    num_annotators: int,
    *,
    annotations_per_item: float = 5.0,
    seed: Seed = 0,
) -> AbilityLevels:
    """T annotators whose levels are drawn from p(g); each labels an item with probability ``annotations_per_item / T``.

    An item that nobody would label is labelled by one of them.

    Args:
        truth: ``[N]`` true classes.
        confusions: ``[M, C, K]`` of the levels, rows sum to 1; :func:`perturbed_confusions` makes the paper's.
        group_probs: ``[M]`` p(g); (0.25, 0.55, 0.20) in setup 1: experts, inexperts, spammers.
        num_annotators: T.
        annotations_per_item: their expected number, above 0 and at most T; 5 in setup 1, 3 in setup 2.
        seed: of all draws, or a generator.

    Raises:
        ValueError: naming the argument.
    """
    confusions = torch.as_tensor(confusions).detach().cpu()
    probs = torch.as_tensor(group_probs, dtype=torch.float64)
    if confusions.ndim != 3 or probs.shape != confusions.shape[:1]:
        raise ValueError(
            f"group_probs {list(probs.shape)} must be [M] beside confusions [M, C, K], got {list(confusions.shape)}"
        )
    if not bool((probs >= 0).all()) or abs(float(probs.sum()) - 1) > 1e-4:
        raise ValueError(f"group_probs must be probabilities that sum to 1, got {probs.tolist()}")
    if num_annotators < 1:
        raise ValueError(f"num_annotators={num_annotators!r} must be 1 or more")
    if not 0 < annotations_per_item <= num_annotators:
        raise ValueError(
            f"annotations_per_item={annotations_per_item!r} must be above 0 and at most num_annotators={num_annotators}"
        )
    generator = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
    groups = torch.multinomial(probs, num_annotators, replacement=True, generator=generator)
    trials = torch.full((len(torch.as_tensor(truth)),), float(num_annotators))
    counts = torch.binomial(trials, torch.tensor(annotations_per_item / num_annotators), generator=generator)
    annotations = simulate(
        truth, confusions[groups], annotations_per_item=counts.long().clamp(min=1), seed=generator
    )  # fmt: skip
    return AbilityLevels(annotations, groups, confusions)


@torch.no_grad()
def perturbed_confusions(
    model: nn.Module, inputs: Tensor, truth: Tensor, noise: Sequence[float], *, seed: Seed = 0
) -> Tensor:
    """``[M, C, C]``: what a trained classifier confuses after noise is added to its weights, one level of it a group.

    The noise is normal, of a parameter's root mean square times the level (the paper does not give its levels). One
    label is added to every cell, so that no label is impossible.

    Args:
        model: gives logits ``[N, C]``; it is copied, not changed.
        inputs: of N items.
        truth: ``[N]`` their classes.
        noise: M levels, 0 or more.
        seed: of the noise, or a generator.
    """
    generator = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
    made = []
    for level in noise:
        noisy = copy.deepcopy(model).eval()
        for parameter in noisy.parameters():
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
            parameter.add_(draw, alpha=float(level * parameter.square().mean().sqrt()))
        logits = noisy(inputs)
        labels = Annotations.from_dense(logits.argmax(1, keepdim=True).cpu(), num_classes=logits.shape[1])
        known = nn.functional.one_hot(truth.cpu(), logits.shape[1])
        made.append(empirical_confusion(known, labels, smoothing=float(logits.shape[1]))[0])
    return torch.stack(made)
