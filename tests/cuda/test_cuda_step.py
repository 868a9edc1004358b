"""The cross-entropy whose gradients come with the loss, on a GPU: against the two ops, which it replaces there."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_close, assert_same
from support.cuda import DEVICE, to_device
from support.op_checks import leaf
from support.problems import make_problem
from torch import Tensor

import crowdnal.functional as F
from crowdnal.functional._autograd import softmax_link

pytestmark = pytest.mark.cuda

SIZES = [(300, 6, 8, 8, 9), (200, 5, 10, 10, 7), (100, 3, 16, 16, 9), (64, 2, 30, 30, 9), (50, 2, 32, 3, 9)]
NAMES = ("scores", "confusion", "shared", "mixing", "weight")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    ("given", "with_prior"),
    [(NAMES[:2], False), (NAMES[:3], True), (NAMES[:3], False), (NAMES[:4], True), (NAMES, False)],
)
def test_loss_and_gradients_are_those_of_the_two_ops(
    sizes: tuple[int, ...], given: tuple[str, ...], with_prior: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = make_problem(*sizes, seed=2)
    a = p.annotations.prepare().to(DEVICE)
    counts, common, labels_given = to_device(p.prior())
    prior = F.DirichletPrior(counts, labels_given, common) if with_prior else None
    assert a.fields.plan is not None and a.fields.plan.is_cuda

    def leaves() -> dict[str, Tensor]:
        return {name: leaf(to_device((getattr(p, name),))[0]) for name in given}

    def loss(named: dict[str, Tensor]) -> Tensor:
        return F.crowd_cross_entropy(annotations=a, prior=prior, **named)

    ours, theirs = leaves(), leaves()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        one = loss(ours)
        assert hasattr(one.grad_fn, "gradients")  # they are there before they are asked for
        (-0.3 * one).backward(retain_graph=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    first = {name: given.grad for name, given in ours.items()}
    for given_leaf in ours.values():
        given_leaf.grad = None
    (-0.3 * one).backward()
    monkeypatch.setattr(softmax_link.softmax_loss, "_is_of_use", lambda _: False)
    two = loss(theirs)
    (-0.3 * two).backward()
    assert_close(one, two)
    for name, wanted in theirs.items():
        assert_close(first[name], wanted.grad)
        assert_same([ours[name].grad], [first[name]], name)  # a second pass makes them again


def test_matrices_that_are_large_or_many_take_the_two_ops() -> None:
    for sizes in ((20, 3, 33, 33, 4), (10, 500, 8, 8, 2)):
        p = make_problem(*sizes, seed=2)
        scores, confusion = (leaf(t) for t in to_device((p.scores, p.confusion)))
        loss = F.crowd_cross_entropy(scores, confusion, p.annotations.to(DEVICE))
        assert not hasattr(loss.grad_fn, "gradients")
