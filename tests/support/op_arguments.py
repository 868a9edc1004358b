"""Arguments of every op, for the tests of the CPU, of the emulator and of a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crowdnal import reference
from support import pairs
from support.problems import Problem, make_problem

SOFTMAX = ["mix", "mix_items", "mix_annotators", "softmax_link", "softmax_link_backward", "softmax_link_step"]
MIXTURE = ["mixture_link", "mixture_link_backward", "mixture_link_step"]
JOINT = ["label_log_likelihood", "label_counts", "joint_link", "joint_link_backward", "joint_link_step", "em_step"]
PAIRS = pairs.NAMES
ALL = SOFTMAX + MIXTURE + JOINT + PAIRS
NORMALIZATIONS = (reference.NONE, reference.SOFTMAX, reference.SOFTPLUS)
Arguments = tuple[Any, ...]


def arguments(problem: Problem, name: str, kind: int = reference.SOFTMAX) -> list[Arguments]:
    """Argument lists that together reach every branch of an op; `kind` matters where matrices are normalised."""
    if name in PAIRS:
        return pairs.make_pairs(problem, 2).arguments(name)
    family = _softmax if name in SOFTMAX else _mixture if name in MIXTURE else _joint
    return family(problem, name, kind)


def of_every_kind(problem: Problem, name: str) -> list[Arguments]:
    """`arguments` of each normalisation that the op knows."""
    kinds = NORMALIZATIONS if "mixture" in name or "joint" in name else (reference.SOFTMAX,)
    return [args for kind in kinds for args in arguments(problem, name, kind)]


def far_below_zero(labels: int, per_item: int, items: int = 12) -> Problem:
    """Softplus underflows in float32 near -100: single entries, whole columns, and whole matrices of them."""
    problem = make_problem(items, 4, 5, labels, per_item, seed=4)
    problem.confusion[0, :, 0] = -110.0
    problem.confusion[1, 2] -= 120.0
    problem.confusion[2] = 40 * problem.confusion[2] - 200.0
    problem.confusion[3] *= 30.0
    return problem


def _stored(p: Problem, kind: int) -> Tensor:
    return p.stored.log_softmax(1) if kind == reference.NONE else p.stored


def _softmax(p: Problem, name: str, kind: int) -> list[Arguments]:
    index, label = p.index, p.annotations.label
    grad, nll_grad = p.grad(p.confusion.shape[2]), p.grad(1).squeeze(1)
    total = torch.tensor(0.7, dtype=torch.double)
    if name == "mix":
        return [(p.scores, p.confusion, *index)]
    if name == "mix_items":
        return [(grad, p.confusion, *index)]
    if name == "mix_annotators":
        return [(p.scores, grad, *index, p.annotations.num_annotators)]
    if name == "softmax_link":
        options = [(None, None, True), (p.shared, p.weight, False), (None, p.weight, True), (p.shared, None, False)]
        plain = [(p.scores, p.confusion, s, None, w, *index, label, mean) for s, w, mean in options]
        return [*plain, (p.scores, p.confusion, p.shared, p.mixing, p.weight, *index, label, True)]
    if name == "softmax_link_step":
        rest, (counts, common, given) = (*index, label), p.prior()
        without, prior, of_rows = (None,) * 3, (counts, common, given), (counts, None, given)
        own, every = (p.scores, p.confusion), (p.scores, p.confusion, p.shared, p.mixing)
        return [
            (*own, None, None, None, *rest, *without, True, True, True, False, False),
            (*own, p.shared, None, p.weight, *rest, *without, False, True, False, True, False),
            (*every, p.weight, *rest, *without, True, True, True, True, True),
            (*every, None, *rest, *of_rows, False, False, True, False, True),
            (*own, p.shared, None, None, *rest, *prior, True, False, False, False, False),
            (*own, p.shared, None, p.weight, *rest, *prior, True, True, True, False, False),
        ]
    probs = reference.softmax_link(p.scores, p.confusion, p.shared, None, None, *index, label, True)[2]
    inputs = p.scores, p.confusion, p.shared

    def backward(of_loss: Any, of_nll: Any, mixing: Any, weight: Any, mean: bool, *needed: str) -> Arguments:
        needs = (name in needed for name in ("scores", "confusion", "shared", "mixing"))
        return (of_loss, of_nll, *inputs, mixing, weight, *index, label, probs, mean, *needs)

    return [
        backward(total, None, None, None, True, "scores", "confusion", "shared"),
        backward(None, nll_grad, None, p.weight, False, "scores", "shared"),
        backward(total, nll_grad, None, p.weight, True, "confusion"),
        backward(total, nll_grad, p.mixing, p.weight, True, "scores", "confusion", "shared", "mixing"),
        backward(total, None, p.mixing, None, False, "mixing"),
    ]


def _mixture(p: Problem, name: str, kind: int) -> list[Arguments]:
    rest, index, label = (p.scores.log_softmax(1), _stored(p, kind)), p.index, p.annotations.label
    if name == "mixture_link":
        options = [(None, True), (p.weight, False), (p.weight, True), (None, False)]
        return [(*rest, weight, *index, label, kind, mean) for weight, mean in options]
    if name == "mixture_link_step":
        counts, _, given = p.prior(stored=True)
        steps = [
            (None, None, None, True, True, True),
            (p.weight, None, None, False, True, False),
            (p.weight, None, None, True, False, True),
            (p.weight, counts, given, False, True, True),
            (None, counts, given, True, True, False),
        ]
        return [(*rest, weight, *index, label, counts, given, kind, *flags) for weight, counts, given, *flags in steps]
    _, _, posterior, norm = reference.mixture_link(*rest, None, *index, label, kind, True)
    total, nll_grad = torch.tensor(0.7, dtype=torch.double), p.grad(1).squeeze(1)
    return [
        (total, None, *rest, None, *index, label, posterior, norm, kind, True, True, True),
        (None, nll_grad, *rest, p.weight, *index, label, posterior, None, kind, False, False, True),
        (total, nll_grad, *rest, p.weight, *index, label, posterior, norm, kind, True, True, False),
    ]


def _joint(p: Problem, name: str, kind: int) -> list[Arguments]:
    rest = (*p.index, p.annotations.label)
    if name == "label_log_likelihood":
        return [(p.stored, weight, *rest) for weight in (None, p.weight)]
    if name == "label_counts":
        sizes = p.annotations.num_annotators, p.annotations.num_classes
        return [(p.scores, weight, *rest, *sizes) for weight in (None, p.weight)]
    if name == "em_step":
        labels, index = p.annotations.num_classes, (p.index[0], *p.index[2:4], p.annotations.label)
        square = p.stored.new_zeros(p.stored.shape[0], labels, labels)
        table, prior = _stored(p, reference.NONE), p.scores.log_softmax(1)
        starts = [(None, square, weight, *index) for weight in (None, p.weight)]
        return [*starts, (prior, table, None, *index), (prior[:1] if len(prior) else prior, table, p.weight, *index)]
    both = p.scores.log_softmax(1), _stored(p, kind)
    if name == "joint_link":
        return [(*both, weight, *rest, kind, mean) for weight, mean in ((None, True), (p.weight, False))]
    if name == "joint_link_step":
        steps = [(None, True, True, True), (p.weight, False, True, False), (p.weight, True, False, True)]
        return [(*both, weight, *rest, kind, *flags) for weight, *flags in steps]
    total, generator = torch.tensor(0.7, dtype=torch.double), torch.Generator().manual_seed(p.seed + 2)
    nll = torch.randn(p.annotations.num_items, dtype=torch.double, generator=generator)
    _, _, posterior, norm = reference.joint_link(*both, p.weight, *rest, kind, True)
    return [
        (total, None, *both, None, *rest, posterior, norm, kind, True, True, True),
        (None, nll, *both, p.weight, *rest, posterior, None, kind, False, False, True),
        (total, nll, *both, p.weight, *rest, posterior, norm, kind, True, True, False),
    ]
