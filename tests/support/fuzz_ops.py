"""Cases of the raw ops: arguments made wrong one by one, and right ones of extreme sizes and values."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from crowdnal import reference
from crowdnal.ops import OPS
from support.fuzz import Case
from support.op_arguments import ALL, of_every_kind
from support.op_checks import as_tuple, to_float
from support.problems import make_problem

INDEX = ("indptr", "item", "annotator", "order", "plan", "label", "annotators")
NUMBERS = (-1, -5, 3, 7, 2**45, 2**61, 2**62, 2**63 - 1)


def case(rng: random.Random) -> Case:
    """Two of three malformed."""
    name = rng.choice([*ALL, "select"])
    scale = 1.0 if rng.random() < 0.7 else 10.0 ** rng.randint(0, 4)
    sizes = [
        rng.choice(choice) for choice in ((0, 1, 2, 9), (1, 2, 7), (1, 2, 3, 9, 17, 33), (1, 2, 3, 9, 33), (0, 1, 4))
    ]
    problem = make_problem(*sizes, seed=rng.randrange(2**31), scale=scale)
    if name == "select":
        good: tuple[Any, ...] = (problem.confusion, problem.annotations.annotator)
    else:
        good = rng.choice(of_every_kind(problem, name))
    good = to_float(good) if rng.random() < 0.5 else tuple(good)
    what = f"{name} of {problem!r}, {good[0] if good[0] is None else good[0].dtype}, scale {scale:g}"
    if rng.random() < 1 / 3:
        return Case(what, lambda: _right(name, good))
    argument, change, bad = malformed(rng, name, good)
    return Case(f"{what}: {argument} {change}", lambda: _refused(name, good, bad))


def malformed(rng: random.Random, name: str, good: tuple[Any, ...]) -> tuple[str, str, tuple[Any, ...]]:
    """(argument, how it is wrong, all arguments)."""
    fields = OPS[name].arguments._fields
    while True:
        n = rng.randrange(len(fields))
        changes = _changes(rng, fields[n], good[n])
        if changes:
            change = rng.choice(sorted(changes))
            return fields[n], change, (*good[:n], changes[change], *good[n + 1 :])


def _changes(rng: random.Random, argument: str, value: Any) -> dict[str, Any]:
    if isinstance(value, bool) or value is None:
        return {}
    if isinstance(value, int):
        return {str(number): number for number in NUMBERS}
    changes = {
        "None": None,
        "on meta": value.to("meta"),
        "0-d": torch.zeros((), dtype=value.dtype),
        "with a dimension more": value.unsqueeze(0),
        "sparse": value.to_sparse(),
        "a number": 3,
        "empty": value.flatten()[:0],
    }
    if value.dim() > 0:
        changes["longer"] = torch.cat([value, value[-1:] if len(value) else value.new_zeros(1, *value.shape[1:])])
        changes["expanded to terabytes"] = value[:1].expand(2**40, *value.shape[1:]) if len(value) else value
        if len(value):
            changes["shorter"] = value[:-1]
    if argument not in INDEX:
        for dtype in (torch.int64, torch.bool, torch.complex64, torch.float16, torch.float8_e5m2):
            changes[str(dtype)] = value.to(dtype)
        changes["of the other dtype"] = value.float() if value.dtype == torch.float64 else value.double()
        return changes
    changes["int16"], changes["float64"] = value.short(), value.double()
    if argument == "plan":
        del changes["None"]  # legal
        if len(value):
            changes["of other annotations"] = value.roll(1, 0) if len(value) > 1 else value + 1
        return changes
    if len(value):
        for number in (-1, -(2**62), 2**62, len(value) + 5):
            changes[f"with {number}"] = value.clone().index_fill_(0, torch.tensor([rng.randrange(len(value))]), number)
        changes["reversed"] = value.flip(0)
        changes["shuffled"] = value[torch.tensor(rng.sample(range(len(value)), len(value)))]
    return changes


def _refused(name: str, good: tuple[Any, ...], bad: tuple[Any, ...]) -> str | None:
    """Right if the call raises; else its result must not depend on what is wrong, or it is legal and right."""
    out = as_tuple(getattr(torch.ops.crowdnal, name)(*bad))
    if _same(out, as_tuple(getattr(torch.ops.crowdnal, name)(*good))):
        return None
    try:
        OPS[name].refuse(bad)
    except ValueError as error:
        return f"accepted: {error}"
    return _compare(out, as_tuple(getattr(reference, name)(*bad)), bad)


def _right(name: str, good: tuple[Any, ...]) -> str | None:
    return _compare(as_tuple(getattr(torch.ops.crowdnal, name)(*good)), as_tuple(getattr(reference, name)(*good)), good)


def _same(ours: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7)) for a, b in zip(ours, others, strict=True))


def _compare(ours: tuple[Tensor, ...], wanted: tuple[Tensor, ...], args: tuple[Any, ...]) -> str | None:
    """Right to 1e-3 in float32 and 1e-7 in float64, of the largest number that is there."""
    largest = max([1.0, *(float(a.abs().max()) for a in args if isinstance(a, Tensor) and a.numel())])
    for n, (a, b) in enumerate(zip(ours, wanted, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {n} is {a.dtype} {list(a.shape)}, the reference's {b.dtype} {list(b.shape)}"
        tolerance = (1e-3 if a.dtype == torch.float32 else 1e-7) * largest
        if a.numel() and not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"output {n} differs from the reference by {float((a - b).abs().max()):g}"
    return None
