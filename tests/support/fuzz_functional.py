"""Cases of the functional layer: tensors made wrong, options made wrong, and extreme ones with their gradients."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from crowdnal import functional as F
from support.fuzz import Case
from support.problems import Problem, make_problem

REDUCTIONS: tuple[Any, ...] = ("mean", "sum", "none", "item_mean", "per_item")
NONSENSE: tuple[Any, ...] = ("", "Mean", "no", 3, True)


def case(rng: random.Random) -> Case:
    """Half of them malformed."""
    sizes = [rng.choice(choice) for choice in ((0, 1, 2, 9), (1, 2, 7), (1, 2, 3, 17), (1, 2, 3, 17), (0, 1, 4))]
    p = make_problem(*sizes, seed=rng.randrange(2**31), scale=10.0 ** rng.choice((0, 0, 0, 1, 4, 30)))
    name = rng.choice(sorted(_calls(p)))
    function, tensors, options = _calls(p)[name]
    dtype = rng.choice((torch.float64, torch.float32, torch.float16, torch.bfloat16))
    tensors = [tensor.to(dtype) for tensor in tensors]
    options = {option: rng.choice(values) for option, values in options.items()}
    if rng.random() < 0.3:
        options["weight"] = p.weight * rng.choice((0.0, 1.0, 1.0 if dtype == torch.float16 else 1e6))
    if "weight" in options and name in ("mix", "mix_items", "mix_annotators", "pair_confusion", "segment_sum"):
        del options["weight"]
    what, bad = f"{name} of {p!r}, {dtype}, {sorted(options)}", False
    if rng.random() < 0.5:
        bad, n = True, rng.randrange(len(tensors) + 1)
        if n < len(tensors):
            change = rng.choice(sorted(_wrong(tensors[n])))
            tensors[n], what = _wrong(tensors[n])[change], f"{what}: tensor {n} {change}"
        else:
            option = rng.choice(("reduction", "normalization", "weight"))
            options[option] = rng.choice(NONSENSE) if option != "weight" else torch.ones(len(p.weight) + 3)
            what = f"{what}: {option}={options[option]!r}"
    return Case(what, lambda: _run(function, tensors, p, options, bad))


def _calls(p: Problem) -> dict[str, tuple[Any, list[Tensor], dict[str, Any]]]:
    a, (_, classes, labels) = p.annotations, p.confusion.shape
    kinds = {"normalization": ("softmax", "softplus")}
    pair = [torch.randn(n, classes, labels, 2) for n in (a.num_items, a.num_annotators)]
    return {
        "crowd_cross_entropy": (F.crowd_cross_entropy, [p.scores, p.confusion], {"reduction": REDUCTIONS}),
        "crowd_mixture_nll": (F.crowd_mixture_nll, [p.scores, p.stored], {"reduction": REDUCTIONS, **kinds}),
        "crowd_marginal_nll": (F.crowd_marginal_nll, [p.scores, p.stored], {"reduction": REDUCTIONS[:3], **kinds}),
        "crowd_posterior": (F.crowd_posterior, [p.scores, p.stored], kinds),
        "label_counts": (F.label_counts, [p.scores], {}),
        "label_log_likelihood": (F.label_log_likelihood, [p.stored], {}),
        "mix": (F.mix, [p.scores, p.confusion], {}),
        "mix_annotators": (F.mix_annotators, [p.scores, p.grad(labels)], {}),
        "mix_items": (F.mix_items, [p.grad(labels), p.confusion], {}),
        "pair_confusion": (F.pair_confusion, pair, {}),
        "segment_sum": (F.segment_sum, [p.grad(labels)], {}),
    }


def _wrong(tensor: Tensor) -> dict[str, Any]:
    return {
        "None": None,
        "a number": 3,
        "a string": "x",
        "0-d": tensor.new_zeros(()),
        "with a dimension more": tensor.unsqueeze(0),
        "with a row more": torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])]),
        "with a column more": torch.cat([tensor, tensor[..., :1]], -1),
        "without columns": tensor[..., :0],
        "on meta": tensor.to("meta"),
        "sparse": tensor.to_sparse(),
        "complex": tensor.to(torch.complex64),
        "integer": torch.ones_like(tensor, dtype=torch.long),
    }


def _run(function: Any, tensors: list[Any], p: Problem, options: dict[str, Any], bad: bool) -> str | None:
    leaves = [t.detach().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors]
    out = function(*leaves[:2], *leaves[2:], p.annotations, **options)
    inputs = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    largest = max([0.0, *(float(t.detach().abs().max()) for t in inputs if t.numel() and t.device.type == "cpu")])
    if out.device.type != "cpu":
        return f"a result on {out.device}"
    half = any(t.dtype in (torch.float16, torch.bfloat16) for t in inputs)
    if bad or largest > (100 if half else 1e5):  # accepted: an integer tensor, say; beyond: sums may overflow
        return None
    if not bool(out.isfinite().all()):
        return "the result is not finite"
    if out.requires_grad:
        grads = torch.autograd.grad(out.float().sum(), inputs, allow_unused=True)
        if not all(g is None or bool(g.isfinite().all()) for g in grads):
            return "a gradient is not finite"
    return None
