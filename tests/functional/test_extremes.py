"""Numbers at the edges: huge logits, impossible labels, a million labels of one, half precision, threads at once."""

from __future__ import annotations

import threading

import pytest
import torch
from support import op_checks
from support.compare import assert_close, assert_same
from support.problems import make_problem
from support.workers import Losses
from torch import Tensor
from torch.utils.data import DataLoader

from crowdnal import functional as F
from crowdnal import reference
from crowdnal.data import Annotations

LOSSES = (F.crowd_cross_entropy, F.crowd_mixture_nll, F.crowd_marginal_nll)


def loss_and_gradients(loss, scores: Tensor, confusion: Tensor, a: Annotations) -> tuple[Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in (scores, confusion)]
    value = loss(*leaves, a)
    return value.detach(), *torch.autograd.grad(value, leaves)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_confident_logits_are_finite(loss, dtype) -> None:
    """Gaps of 2e4, beyond what exp can hold; a softmax link only as far as its products are numbers."""
    p = make_problem(12, 4, 5, 5, 4, seed=0)
    wide_type = torch.promote_types(dtype, torch.float32)
    logits = (1e4 * p.scores.sign()).to(dtype)
    scores = logits.softmax(1) if loss is F.crowd_cross_entropy else logits.to(wide_type).log_softmax(1)
    confusion = (p.stored if loss is not F.crowd_cross_entropy else p.confusion).to(dtype)
    found = loss_and_gradients(loss, scores, confusion, p.annotations)
    assert all(bool(each.isfinite().all()) for each in found)
    wide = loss_and_gradients(loss, scores.double(), confusion.double(), p.annotations)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5 if dtype == torch.float32 else 2e-2
    assert_close([each.double() for each in found], list(wide), rtol=tolerance, atol=tolerance, where="output")


@pytest.mark.parametrize("scale", [1e4, 1e30])
@pytest.mark.parametrize("loss", LOSSES[1:])
def test_huge_logits(loss, scale: float) -> None:
    """Of which a softmax is certain: float32 and float64 agree, as far as float32 tells the loss."""
    p = make_problem(12, 4, 5, 5, 4, seed=0)
    certain = p.scores == p.scores.amax(1, keepdim=True)
    found = {}
    for dtype in (torch.float64, torch.float32):
        logits = (scale * certain).to(dtype).requires_grad_()
        stored = p.stored.to(dtype).requires_grad_()
        value = loss(logits.log_softmax(1), stored, p.annotations)
        found[dtype] = [value.detach(), *torch.autograd.grad(value, (logits, stored))]
        assert all(bool(each.isfinite().all()) for each in found[dtype])
    wide = found[torch.float64]
    assert_close([each.double() for each in found[torch.float32]], wide, rtol=1e-5, atol=1e-5, where="output")


def test_impossible_labels() -> None:
    """Zeros of a confusion: a label that no class explains has an infinite loss and a posterior of 0, never NaN."""
    a = Annotations([0, 1, 2], [0, 0], [0, 1], num_annotators=1, num_classes=2)
    table = torch.tensor([[[0.0, 0.0], [1.0, 1.0]]]).log()  # label 0 is never given
    prior = torch.full((2, 2), 0.5).log()
    nll = F.crowd_marginal_nll(prior, table, a, normalization="none", reduction="none")
    posterior = F.crowd_posterior(prior, table, a, normalization="none")
    assert nll.tolist() == [torch.inf, 0.0] and posterior.tolist() == [[0.0, 0.0], [0.5, 0.5]]


@op_checks.native  # the reference adds up one after the other
@pytest.mark.parametrize("whose", ["annotator", "item"])
def test_a_million_labels_of_one(whose: str) -> None:
    """Of one annotator, or of one item: float32 stays within a rounding or two of float64."""
    nnz = 1_000_000
    label = torch.arange(nnz) % 3
    if whose == "annotator":
        a = Annotations(torch.arange(nnz + 1), torch.zeros(nnz).long(), label, num_annotators=1, num_classes=3)
    else:
        a = Annotations([0, nnz], torch.arange(nnz) % 5, label, num_annotators=5, num_classes=3)
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(a.num_items, 3, generator=generator).log_softmax(1)
    table = torch.randn(a.num_annotators, 3, 3, generator=generator)
    loss = F.crowd_mixture_nll if whose == "annotator" else F.crowd_marginal_nll
    single = loss_and_gradients(loss, scores, table, a)
    double = loss_and_gradients(loss, scores.double(), table.double(), a)
    for ours, truth in zip(single, double, strict=True):
        assert_close(ours.double(), truth, rtol=2e-5, atol=2e-5 * float(truth.abs().max()), where=whose)


def test_threads_of_python_at_once() -> None:
    """Six, each with its own problem: the bits of one alone."""
    problems = [make_problem(60, 7, 5, 5, 5, seed=seed) for seed in range(6)]

    def run(n: int) -> list[Tensor]:
        p = problems[n]
        return [
            out
            for _ in range(5)
            for loss in LOSSES
            for out in loss_and_gradients(
                loss, p.scores, p.confusion if loss is F.crowd_cross_entropy else p.stored, p.annotations
            )
        ]

    alone, together = [run(n) for n in range(6)], [[] for _ in range(6)]
    threads = [threading.Thread(target=lambda n=n: together[n].extend(run(n))) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, wanted in zip(together, alone, strict=True):
        assert_same(ours, wanted, "output")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_by_fork_and_spawn(method: str) -> None:
    """The bits of this process, which has used its threads before it forks."""
    if method not in torch.multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    here = [Losses()[n] for n in range(6)]
    loader = DataLoader(Losses(), batch_size=None, num_workers=2, multiprocessing_context=method, timeout=120)
    assert_same(list(loader), here, "output")


def test_memory_does_not_grow() -> None:
    """Steps of random sizes; the long soak is `pytest -m slow`."""
    soak(150, 3)


@pytest.mark.slow
def test_memory_and_descriptors_do_not_grow_over_30000_steps() -> None:
    soak(30_000, 16)


def soak(steps: int, megabytes: int) -> None:
    """Resident memory and open files behind the first third of the steps stay what they were."""
    import os

    def use() -> tuple[int, int]:
        pages = int(open("/proc/self/statm").read().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // 2**20, len(os.listdir("/proc/self/fd"))

    if not os.path.exists("/proc/self/statm"):
        pytest.skip("needs /proc")
    before = (0, 0)
    for step in range(steps):
        p = make_problem(1 + step % 40, 1 + step % 7, 2 + step % 5, 2 + step % 5, 4, seed=step)
        loss = LOSSES[step % 3]
        loss_and_gradients(loss, p.scores, p.confusion if step % 3 == 0 else p.stored, p.annotations)
        before = use() if step == steps // 3 else before
    after = use()
    assert after[0] <= before[0] + megabytes and after[1] <= before[1]


def test_the_reference_knows_no_impossible_posterior_from_nan() -> None:
    nan = torch.tensor([[torch.nan, 0.0], [-torch.inf, -torch.inf], [0.0, 0.0]])
    _, _, posterior = reference.log_sum(nan, None, False)
    assert posterior[0].isnan().all() and posterior[1:].tolist() == [[0.0, 0.0], [0.5, 0.5]]
