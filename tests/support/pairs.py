"""Random pair confusions for the tests: the annotations of `problems`, difficulty and competence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from crowdnal import reference
from crowdnal.data import Annotations
from support.problems import Problem, make_problem, problems

NAMES = ["pair_confusion", "pair_confusion_backward"]


@dataclass
class Pairs:
    problem: Problem
    difficulty: Tensor  # [B, C, K, L]
    competence: Tensor  # [R, C, K, L]

    @property
    def inputs(self) -> tuple[Any, ...]:
        p = self.problem
        return (self.difficulty, self.competence, *p.index, p.annotations.label)

    @property
    def grad(self) -> Tensor:
        return self.problem.grad(self.difficulty.shape[1])

    @property
    def annotations(self) -> Annotations:
        return self.problem.annotations

    def backward_inputs(self, needs: tuple[bool, bool]) -> tuple[Any, ...]:
        return (self.grad, *self.inputs, *reference.pair_confusion(*self.inputs), *needs)

    def arguments(self, name: str) -> list[tuple[Any, ...]]:
        if name == "pair_confusion":
            return [self.inputs]
        return [self.backward_inputs(needs) for needs in ((True, True), (True, False), (False, True))]


def make_pairs(problem: Problem, latents: int, scale: float = 1.0) -> Pairs:
    generator = torch.Generator().manual_seed(problem.seed + 2)
    _, *sizes = problem.confusion.shape

    def randn(count: int) -> Tensor:
        return scale * torch.randn(count, *sizes, latents, dtype=torch.double, generator=generator)

    return Pairs(problem, randn(problem.annotations.num_items), randn(problem.annotations.num_annotators))


@st.composite
def pairs(draw: st.DrawFn, max_matrices: int = 50_000) -> Pairs:
    """Scales up to where sums of float32 and float64 exponentials underflow."""
    scale = draw(st.sampled_from([1.0, 1.0, 5.0, 40.0, 300.0]))
    return make_pairs(draw(problems(max_matrices)), draw(st.integers(1, 5)), scale)


def impossible() -> Pairs:
    case = make_pairs(make_problem(12, 5, 3, 3, 4, seed=9), 2)
    case.difficulty[::2, 0, 1] = -torch.inf  # label 1 cannot be
    case.competence[0, 1, 2, 0] = -torch.inf  # one latent of two
    case.difficulty[1, 2, :, 0] = case.competence[:2, 2, :, 1] = -torch.inf  # together: class 2 allows nothing
    return case
