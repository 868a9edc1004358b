"""Cases of the objectives: options that make no sense, and a step of those that do on logits of any size."""

from __future__ import annotations

import inspect
import random
from typing import Any

from crowdnal.objectives import OBJECTIVES
from support.fuzz import Case
from support.objectives import CASES, features_of, small
from support.small_crowd import C, R, logits_of

NONSENSE: tuple[Any, ...] = (-1, 0, 2, 1e30, -0.5, 2.5, float("nan"), float("inf"), "x", None, True, [], [1], 2**40)
COUNTS: tuple[Any, ...] = (-1, 0, 2.5, float("nan"), "3", None, True, [3])


def case(rng: random.Random) -> Case:
    """Two of three malformed."""
    name = rng.choice(sorted(CASES))
    if rng.random() < 1 / 3:
        scale, weighted = 10.0 ** rng.choice((0, 2, 4)), rng.random() < 0.5
        return Case(
            f"{name}: a step, logits times {scale:g}, weighted {weighted}", lambda: _step(name, scale, weighted)
        )
    cls = OBJECTIVES[CASES[name].name]
    options = [p for p, q in inspect.signature(cls).parameters.items() if q.kind is q.KEYWORD_ONLY]
    option = rng.choice(["num_classes", "num_annotators", *options])
    value = rng.choice(COUNTS if option.startswith("num_") else NONSENSE)
    return Case(f"{name}: {option}={value!r}", lambda: _construct(name, option, value))


def _construct(name: str, option: str, value: Any) -> str | None:
    case = CASES[name]
    cls = OBJECTIVES[case.name]
    given = {k: v(R, 4) if callable(v) else v for k, v in case.options.items()}
    if "feature_dim" in inspect.signature(cls).parameters:
        given.setdefault("feature_dim", 5)
    sizes = {"num_classes": C, "num_annotators": R, **given, option: value}
    objective = cls(sizes.pop("num_classes"), sizes.pop("num_annotators"), **sizes).double()
    annotations, inputs = small(), (logits_of(), features_of())
    objective.on_train_start(annotations, lambda: inputs)
    objective.on_epoch_start(0)
    objective(inputs[0], annotations, inputs[1])
    return None


def _step(name: str, scale: float, weighted: bool) -> str | None:
    objective = CASES[name].begun(small(weighted))
    logits = logits_of(scale=scale).requires_grad_()
    out = objective(logits, small(weighted), features_of())
    loss = out.loss if hasattr(out, "loss") else out
    if not bool(loss.isfinite().all()):
        return f"the loss is {loss.tolist()}"
    loss.sum().backward()
    return None if logits.grad is None or bool(logits.grad.isfinite().all()) else "a gradient is not finite"
