"""Dawid-Skene: exact EM, the same posteriors as crowd-kit, and what real data throws at it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import assert_close
from support.crowds import simulated, weighted
from torch import Tensor

import crowdnal
from crowdnal import Annotations, DawidSkeneResult, metrics

dawid_skene = partial(crowdnal.dawid_skene, confusion_prior=None)  # the paper's

DATA = os.environ.get("CROWDNAL_DATA")
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "dawid_skene.py"
SIZES = [(2, 20, 200), (5, 30, 500)]  # classes, annotators, items


def same(a: DawidSkeneResult, b: DawidSkeneResult) -> None:
    for name in ("posterior", "confusion", "class_prior", "log_likelihood"):
        assert_close(getattr(a, name), getattr(b, name))


def test_two_iterations_by_hand() -> None:
    a, _, _ = simulated(3, 5, 12)
    a.weight = torch.linspace(0.5, 2, a.num_annotations, dtype=torch.double)
    rows = list(zip(a.item.tolist(), a.annotator.tolist(), a.label.tolist(), a.weight.tolist(), strict=True))
    posterior = np.zeros((12, 3))
    for i, _, y, w in rows:
        posterior[i, y] += w
    posterior /= posterior.sum(1, keepdims=True)
    likelihoods = []
    for _ in range(2):
        counts, prior = np.full((5, 3, 3), 0.1), posterior.mean(0)
        for i, r, y, w in rows:
            counts[r, :, y] += w * posterior[i]
        confusion = counts / counts.sum(2, keepdims=True)
        joint = np.tile(prior, (12, 1))
        for i, r, y, w in rows:
            joint[i] *= confusion[r, :, y] ** w
        likelihoods.append(float(np.log(joint.sum(1)).sum()))
        posterior = joint / joint.sum(1, keepdims=True)
    result = dawid_skene(a, max_iterations=2, tolerance=-1, smoothing=0.1)
    assert_close(result.posterior, posterior)
    assert_close(result.confusion, confusion)
    assert_close(result.class_prior, prior)
    assert_close(result.log_likelihood, likelihoods)


def test_recovers_the_truth() -> None:
    a, truth, confusion = simulated(4, 15, 3000)
    result = dawid_skene(a)
    assert result.converged and 1 < len(result.log_likelihood) < 100
    majority = metrics.accuracy(a.votes(), truth)
    assert metrics.accuracy(result.labels, truth) > majority + 0.03
    assert metrics.confusion_error(confusion, result.confusion) < 0.005
    assert_close(result.posterior.sum(1), torch.ones(3000, dtype=torch.double))
    assert_close(result.confusion.sum(2), torch.ones(15, 4, dtype=torch.double))


def test_a_known_class_counts_without_labels_and_with_labels_that_weigh_nothing() -> None:
    gold = torch.tensor([0, 0, 1])
    for indptr in ([0, 1, 2, 2], [0, 1, 2, 3]):
        labels = [0, 0, 0][: indptr[-1]]
        a = Annotations(indptr, [0] * len(labels), labels, num_annotators=1, num_classes=2)
        a.weight = torch.tensor([1.0, 1.0, 0.0], dtype=torch.double)[: len(labels)]
        result = dawid_skene(a, gold=gold, max_iterations=2, tolerance=-1)
        assert_close(result.class_prior, torch.tensor([2 / 3, 1 / 3], dtype=torch.double))
        assert result.log_likelihood[-1] == pytest.approx(2 * np.log(2 / 3) + np.log(1 / 3))


@settings(max_examples=40, deadline=None)
@given(st.data(), weighted(), st.sampled_from([0.0, 0.3]), st.booleans(), st.booleans())
def test_the_objective_never_decreases(
    data: st.DataObject, a: Annotations, smoothing: float, with_prior: bool, start: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (a.num_annotators, a.num_classes, a.num_classes)
    options: dict[str, Any] = {"smoothing": smoothing}
    if with_prior:
        options["confusion_prior"] = torch.rand(*shape[1:], generator=generator)
    if start:
        options["initial_confusion"] = torch.rand(shape, generator=generator).softmax(2)
    if data.draw(st.booleans()):
        known = st.lists(st.integers(-1, a.num_classes - 1), min_size=len(a), max_size=len(a))
        options["gold"] = torch.tensor(data.draw(known), dtype=torch.long)
    result = dawid_skene(a, max_iterations=12, tolerance=-1, **options)
    steps = np.diff(result.objective)
    assert len(steps) == 11 and (steps >= -1e-7 * (1 + abs(result.objective[0]))).all(), result.objective
    assert result.posterior.isfinite().all() and result.confusion.isfinite().all()
    if smoothing == 0 and not with_prior:
        assert result.objective == result.log_likelihood


# crowd-kit


def crowdkit_posterior(a: Annotations, iterations: int, gold: Tensor | None = None, start: Tensor | None = None) -> Any:
    aggregation = pytest.importorskip("crowdkit.aggregation")
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"task": a.item, "worker": a.annotator, "label": a.label})
    known = None if gold is None else pandas.Series(gold[gold >= 0], index=(gold >= 0).nonzero()[:, 0].numpy())
    strategy, initial = None, None
    if start is not None:
        pairs = [range(a.num_annotators), range(a.num_classes)]
        index = pandas.MultiIndex.from_product(pairs, names=["worker", "label"])
        strategy, initial = "assign", pandas.DataFrame(start.transpose(1, 2).reshape(-1, start.shape[1]), index=index)
    model = aggregation.DawidSkene(iterations, tol=-math.inf, initial_error_strategy=strategy)
    probas = model.fit(frame, known, initial).probas_
    return torch.from_numpy(probas.loc[range(len(a)), range(a.num_classes)].to_numpy().copy())


@pytest.mark.quick(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("iterations", [1, 2, 25])
def test_posteriors_are_those_of_crowdkit(sizes: tuple[int, int, int], iterations: int) -> None:
    a, truth, _ = simulated(*sizes)
    gold = torch.where(torch.arange(len(truth)) % 7 == 0, (truth + 1) % sizes[0], -1)
    generator = torch.Generator().manual_seed(0)
    start = torch.rand(sizes[1], sizes[0], sizes[0], generator=generator, dtype=torch.double).softmax(2)
    for known, initial in ((None, None), (gold, None), (None, start)):
        wanted = crowdkit_posterior(a, iterations, known, initial)
        ours = dawid_skene(a, max_iterations=iterations, tolerance=-1, gold=known, initial_confusion=initial)
        assert_close(ours.posterior, wanted, rtol=0, atol=1e-6)


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(DATA is None, reason="CROWDNAL_DATA does not name the folder of real crowd data")
@pytest.mark.parametrize("name", ["rte", "temporal", "bluebirds", "dog", "face"])
def test_posteriors_are_those_of_crowdkit_on_real_data(name: str) -> None:
    a = Annotations.from_long(Path(DATA or "") / "aggregation" / f"{name}_annotations.csv")
    for iterations in (1, 2, 50):
        ours = dawid_skene(a, max_iterations=iterations, tolerance=-1)
        assert_close(ours.posterior, crowdkit_posterior(a, iterations), rtol=0, atol=1e-6)


# Options


def test_gold_labels_hold_and_inform() -> None:
    a, truth, _ = simulated(5, 30, 500)
    gold = torch.where(torch.arange(500) < 100, truth, -1)
    result = dawid_skene(a, gold=gold)
    assert torch.equal(result.posterior[:100], torch.nn.functional.one_hot(truth[:100], 5).double())
    free = dawid_skene(a)
    assert metrics.accuracy(result.labels[100:], truth[100:]) >= metrics.accuracy(free.labels[100:], truth[100:])
    wrong = dawid_skene(a, gold=torch.where(gold >= 0, (gold + 1) % 5, -1))
    assert wrong.log_likelihood[-1] < result.log_likelihood[-1]


def test_a_gold_item_nobody_labelled_counts_for_the_class_prior() -> None:
    a = Annotations([0, 1, 2, 2, 2], [0, 0], [0, 1], num_annotators=1, num_classes=2)
    result = dawid_skene(a, gold=torch.tensor([0, 1, 1, -1]))
    assert_close(result.class_prior, torch.tensor([1 / 3, 2 / 3], dtype=torch.double))
    assert result.log_likelihood[-1] == pytest.approx(math.log(1 / 3) + 2 * math.log(2 / 3))


def test_start_and_prior_are_different_things() -> None:
    a, truth, confusion = simulated(5, 30, 500)
    flipped = confusion.flip(1)  # classes in reverse
    start = dawid_skene(a, initial_confusion=flipped)
    assert metrics.accuracy(4 - start.labels, truth) > 0.8
    one = dawid_skene(a, initial_confusion=flipped, max_iterations=1)
    assert_close(one.confusion, flipped)
    held = dawid_skene(a, confusion_prior=1e9 * confusion)
    assert_close(held.confusion, confusion, rtol=1e-3, atol=1e-6)
    same(dawid_skene(a, smoothing=0.7), dawid_skene(a, confusion_prior=torch.full((5, 5), 0.7)))
    same(dawid_skene(a, smoothing=0.7), dawid_skene(a, smoothing=0.2, confusion_prior=torch.full((30, 5, 5), 0.5)))
    assert dawid_skene(a, smoothing=0.7).confusion.min() > 0.001


def test_more_classes_than_labels_from_a_start() -> None:
    a, _, _ = simulated(2, 20, 200)
    start = torch.rand(20, 3, 2, generator=torch.Generator().manual_seed(0)).softmax(2)
    result = dawid_skene(a, initial_confusion=start)
    assert result.posterior.shape == (200, 3) and result.confusion.shape == (20, 3, 2)
    assert (np.diff(result.log_likelihood) > -1e-7).all()


def test_what_is_legal() -> None:
    """An item without annotations, an annotator without any, one who always says the same, a class nobody used."""
    a = Annotations([0, 3, 3, 6, 9], [0, 1, 2] * 3, [0, 0, 0, 1, 1, 0, 1, 0, 0], num_annotators=4, num_classes=3)
    result = dawid_skene(a)
    assert_close(result.posterior[1], result.class_prior)
    assert_close(result.class_prior, result.class_prior.new_tensor([2 / 3, 1 / 3, 0]), rtol=0, atol=0.1)
    assert result.posterior[:, 2].eq(0).all()
    assert_close(result.confusion[3], torch.full((3, 3), 1 / 3, dtype=torch.double))
    assert result.confusion[2].tolist() == [[1, 0, 0]] * 3
    assert result.labels.tolist() == [0, 0, 1, 0]
    for items, indptr in ((0, [0]), (2, [0, 0, 0])):
        empty = dawid_skene(Annotations(indptr, [], [], num_annotators=2, num_classes=3))
        assert empty.posterior.shape == (items, 3) and empty.log_likelihood[-1] == 0 and empty.converged
    nothing = dawid_skene(Annotations([0, 2], [0, 1], [0, 1], num_annotators=2, num_classes=2, weight=[0.0, 0.0]))
    assert nothing.posterior.tolist() == [[0.5, 0.5]] and nothing.log_likelihood[-1] == 0 and nothing.converged


def test_ties_are_the_lowest_class() -> None:
    a = Annotations([0, 2], [0, 1], [2, 1], num_annotators=2, num_classes=3)
    result = dawid_skene(a)
    assert result.posterior.tolist() == [[0, 0.5, 0.5]] and result.labels.tolist() == [1]


def test_weight_two_is_the_label_twice_and_weight_zero_none() -> None:
    items, who, labels = [0, 3, 5, 6], [0, 1, 2, 0, 1, 2], [0, 0, 1, 1, 1, 0]
    a = Annotations(items, who, labels, num_annotators=3, num_classes=2, weight=[1.0, 2, 1, 0, 1, 1])
    twice = Annotations([0, 4, 5, 6], [0, 1, 1, 2, 1, 2], [0, 0, 0, 1, 1, 0], num_annotators=3, num_classes=2)
    same(dawid_skene(a, max_iterations=7, tolerance=-1), dawid_skene(twice, max_iterations=7, tolerance=-1))


def test_bitwise_repeatable_over_threads_and_float32_is_close() -> None:
    a, _, _ = simulated(5, 30, 20_000)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            results.append(dawid_skene(a, max_iterations=6, tolerance=-1))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert torch.equal(results[0].posterior, other.posterior) and torch.equal(results[0].confusion, other.confusion)
        assert results[0].log_likelihood == other.log_likelihood
    single = dawid_skene(a, max_iterations=6, tolerance=-1, dtype=torch.float32)
    assert single.posterior.dtype == single.confusion.dtype == torch.float32
    assert_close(single.posterior.double(), results[0].posterior, rtol=0, atol=1e-3)


def test_when_it_stops() -> None:
    a, _, _ = simulated(2, 20, 200)
    full = dawid_skene(a, max_iterations=200, tolerance=-1)
    assert len(full.log_likelihood) == 200 and not full.converged
    stopped = dawid_skene(a, tolerance=1e-4)
    n = len(stopped.log_likelihood)
    steps = np.diff(full.log_likelihood) / a.num_annotations
    assert stopped.converged and stopped.log_likelihood == full.log_likelihood[:n]
    assert steps[n - 2] < 1e-4 and (steps[: n - 2] >= 1e-4).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_iterations": 0}, "max_iterations must be 1 or more"),
        ({"tolerance": math.nan}, "tolerance must be a number"),
        ({"smoothing": -1.0}, "smoothing must be finite"),
        ({"dtype": torch.float16}, "dtype must be"),
        ({"gold": torch.zeros(3, dtype=torch.long)}, r"gold must be \[N\] integers for N = 200"),
        ({"gold": torch.full((200,), 0.5)}, "gold"),
        ({"gold": torch.full((200,), 2)}, r"gold\[0\] is 2, outside \[0, 2\); mark unknown"),
        ({"initial_confusion": torch.ones(20, 2, 3)}, r"initial_confusion has shape \(20, 2, 3\).*\(20, C, 2\)"),
        ({"initial_confusion": torch.ones(20, 2, 2)}, "initial_confusion has a row that is no distribution"),
        ({"confusion_prior": torch.ones(3, 2)}, r"confusion_prior has shape \(3, 2\)"),
        ({"confusion_prior": -torch.ones(2, 2)}, "confusion_prior must hold pseudo-counts"),
    ],
)
def test_errors_name_the_argument(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dawid_skene(simulated(2, 20, 200)[0], **options)


@pytest.mark.slow
def test_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "dawid_skene.json"
    options = ["--annotations", "2000", "--iterations", "2", "--threads", "1", "--json", str(file)]
    done = subprocess.run([sys.executable, str(BENCHMARK), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert written["annotations"] == 2000 and written["iterations"] == 2
    assert written["machine"]["threads"] == 1
    ours, theirs = written["crowdnal"], written["crowd-kit"]
    assert ours["seconds"] > 0 and ours["seconds_an_iteration"] == pytest.approx(ours["seconds"] / 2)
    if theirs is not None:
        assert written["ratio"] == pytest.approx(theirs["seconds"] / ours["seconds"])
        assert written["largest_difference"] < 1e-6
    assert "crowdnal" in done.stdout
