"""The contract of test_objectives.py for objectives that have a test file of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import test_objectives as every
import torch

EVERYONE: list[Callable[..., None]] = [
    every.test_backward_twice_and_scaled_upstream,
    every.test_inputs_are_not_changed,
    every.test_no_gradient_asked_none_given,
    every.test_confident_bfloat16_logits_are_computed_in_float32,
    every.test_autocast_does_not_touch_the_loss,
    every.test_dense_targets,
    every.test_one_item_one_annotator,
    every.test_errors_say_what_does_not_fit,
    every.test_bitwise_repeatable_over_runs_and_threads,
    every.test_hooks_and_repr,
]
CONFUSIONS: list[Callable[..., None]] = [
    every.test_bfloat16_parameters,
    every.test_confusion_is_detached_stochastic_and_starts_diagonal,
    every.test_confusion_is_the_likelihood_of_a_certain_classifier,
    every.test_posterior_uses_the_shown_confusion,
]
OWN_MATRICES: list[Callable[..., None]] = [
    every.test_state_dict_round_trip_and_parameters,
    every.test_an_optimizer_step_reaches_who_labelled_and_nobody_else,
]


def check(makers: Mapping[str, Any], name: str, checks: list[Callable[..., None]]) -> None:
    """Runs the checks of one objective."""

    def make(*sizes: int, **kwargs: Any) -> Any:
        torch.manual_seed(0)  # the start may be random
        return makers[name](*sizes, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(every, "MAKERS", {name: make})
        for one in checks:
            one(name)
        for reduction in ("mean", "sum", "item_mean"):
            for items in (0, 3):
                every.test_empty_batch_is_zero_with_zero_gradients(name, items, reduction)
        for layout in ("transposed", "stride 0"):
            every.test_strided_logits(name, layout)
