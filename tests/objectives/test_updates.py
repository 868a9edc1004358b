"""An objective that is used as a plain loss trains nothing of its own: that is said, once, and of no other."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from support.attached import C, R, labels, mlp
from torch import Tensor

from crowdnal.objectives import CrowdLayer, MajorityVote, Objective
from crowdnal.objectives._bases.updates import STEPS


def train(objective: Objective, parameters: Iterable[Tensor], steps: int = STEPS + 5, accumulate: int = 1) -> list[str]:
    """What was warned of."""
    model, a, x = mlp(), labels(8), torch.randn(8, 5)
    optimizer = torch.optim.SGD([*model.parameters(), *parameters], lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            objective(model(x), a).backward()
            if step % accumulate == accumulate - 1:
                optimizer.step()
                optimizer.zero_grad()
    return [str(warning.message) for warning in caught]


def test_it_is_said_once() -> None:
    objective = CrowdLayer(C, R)
    (said,) = train(objective, [])
    assert "parameters of CrowdLayer were not updated in 20 steps" in said and "crowdnal.param_groups" in said
    assert torch.equal(objective.annotators.weight, torch.eye(C).expand(R, C, C))
    assert train(objective, []) == []


def test_nothing_is_said_where_they_are_trained_frozen_or_none() -> None:
    objective = CrowdLayer(C, R)
    assert train(objective, objective.parameters()) == []
    assert train(CrowdLayer(C, R).requires_grad_(False), []) == []
    assert train(MajorityVote(C, R), []) == []
    assert train(CrowdLayer(C, R).eval(), []) == []
    late = CrowdLayer(C, R)  # gradients are summed over more steps than it takes to be warned
    assert train(late, late.parameters(), 3 * STEPS, accumulate=2 * STEPS) == []


def test_sparse_gradients_count_as_updates() -> None:
    objective = CrowdLayer(C, R, sparse_grad=True)
    assert train(objective, objective.parameters()) == []


def test_steps_of_other_models_do_not_count() -> None:
    idle = CrowdLayer(C, R)
    idle(mlp()(torch.randn(8, 5)), labels(8)).backward()
    other = CrowdLayer(C, R)
    assert train(other, other.parameters(), 2 * STEPS) == []
