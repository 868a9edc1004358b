"""Whether the parameters of an objective are ever updated: one that is used as a plain loss is not in the optimizer."""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS = 20
"""Steps of any optimizer after which a warning is due."""

_watched: WeakKeyDictionary[nn.Module, _Watch] = WeakKeyDictionary()


class _Watch:
    def __init__(self, parameters: list[Tensor]) -> None:
        self.versions = [parameter._version for parameter in parameters]
        self.steps = 0
        self.called = True
        """Whether there was a loss since the last step: the optimizers of other models make steps, too."""


def watch(objective: nn.Module) -> None:
    """Warns once if optimizers make steps while the objective's parameters collect gradients and stay what they are.

    To be called with every loss.
    """
    seen = _watched.get(objective)
    if seen is not None:
        seen.called = True
        return
    if objective in _done:
        return
    parameters = _plain(objective)
    if parameters:
        if not _hooked:
            _hooked.append(register_optimizer_step_post_hook(_after_step))
        _watched[objective] = _Watch(parameters)


_done: WeakSet[nn.Module] = WeakSet()
_hooked: list[Any] = []


def _plain(objective: nn.Module) -> list[Tensor]:
    """Its trained parameters; none where they are views of something else that is stepped (FSDP) or not made yet."""
    trained: list[Tensor] = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    kinds = {type(parameter) for parameter in trained}
    return trained if kinds == {nn.Parameter} and not any(p.is_inference() for p in trained) else []


def _after_step(*_: Any) -> None:
    for objective, seen in list(_watched.items()):
        parameters = _plain(objective)
        if [parameter._version for parameter in parameters] != seen.versions:
            del _watched[objective]
            _done.add(objective)
            continue
        seen.steps += seen.called and any(parameter.grad is not None for parameter in parameters)
        seen.called = False
        if seen.steps == STEPS:
            del _watched[objective]
            _done.add(objective)
            name = type(objective).__name__
            warnings.warn(
                f"the parameters of {name} were not updated in {STEPS} steps of an optimizer, so that its annotators "
                "stay at their init: hand them to the optimizer too (crowdnal.param_groups(model, lr) of a model made "
                f"by crowdnal.attach, or objective.parameters()), or freeze them if that is meant",
                stacklevel=3,
            )
