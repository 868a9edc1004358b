from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import assert_close

from crowdnal import simulation
from crowdnal.metrics import empirical_confusion, spammer_score
from crowdnal.simulation import hammer_spammer_confusions, pair_flip_confusions, simulate, symmetric_confusions


def assert_same(a, b) -> None:
    for name in ("indptr", "annotator", "label"):
        assert torch.equal(getattr(a, name), getattr(b, name))


@given(st.integers(1, 5), st.integers(1, 5), st.floats(0, 1))
@settings(deadline=None)
def test_confusions_are_distributions_with_the_accuracy_asked_for(annotators: int, classes: int, right: float) -> None:
    made = [
        symmetric_confusions(annotators, classes, right),
        pair_flip_confusions(annotators, classes, right, seed=3),
        pair_flip_confusions(annotators, classes, right, seed=None),
        hammer_spammer_confusions(annotators, classes, 1.0, accuracy=right),
    ]
    for confusion in made:
        assert confusion.shape == (annotators, classes, classes) and bool((confusion >= 0).all())
        assert_close(confusion.sum(2), torch.ones(annotators, classes))
        expected = right if classes > 1 else 1.0
        diagonal = confusion.diagonal(dim1=1, dim2=2)
        assert_close(diagonal, torch.full((annotators, classes), expected))


def test_symmetric() -> None:
    confusion = symmetric_confusions(2, 3, [0.4, 1.0])
    assert_close(confusion[0], torch.tensor([[0.4, 0.3, 0.3], [0.3, 0.4, 0.3], [0.3, 0.3, 0.4]]))
    assert torch.equal(confusion[1], torch.eye(3))


def test_pair_flip() -> None:
    confusion = pair_flip_confusions(40, 5, 0.6, seed=1)
    assert bool(((confusion > 0).sum(2) == 2).all())
    target = (confusion - 0.6 * torch.eye(5)).argmax(2)
    assert len({tuple(row) for row in target.tolist()}) > 30
    assert sorted(Counter((target - torch.arange(5)).remainder(5).flatten().tolist())) == [1, 2, 3, 4]
    assert torch.equal(confusion, pair_flip_confusions(40, 5, 0.6, seed=1))
    assert not torch.equal(confusion, pair_flip_confusions(40, 5, 0.6, seed=2))
    following = pair_flip_confusions(1, 3, 0.75, seed=None)[0]
    assert following.tolist() == [[0.75, 0.25, 0], [0, 0.75, 0.25], [0.25, 0, 0.75]]


def test_hammers_and_spammers() -> None:
    confusion = hammer_spammer_confusions(20, 4, 0.3, seed=5)
    score = spammer_score(confusion)
    assert int((score == 1).sum()) == 6 and int((score.abs() < 1e-6).sum()) == 14
    assert torch.equal(confusion, hammer_spammer_confusions(20, 4, 0.3, seed=5))
    assert not torch.equal(confusion, hammer_spammer_confusions(20, 4, 0.3, seed=6))
    assert bool((spammer_score(hammer_spammer_confusions(5, 4, 0.0)) < 1e-6).all())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: symmetric_confusions(2, 3, 1.5), r"accuracy\[0\] is 1.5"),
        (lambda: symmetric_confusions(2, 3, [0.5, -1]), r"accuracy\[1\] is -1.0"),
        (lambda: symmetric_confusions(2, 3, [0.5] * 3), r"accuracy must be a number or \[2\]"),
        (lambda: symmetric_confusions(0, 3), "must be 1 or more"),
        (lambda: hammer_spammer_confusions(2, 3, 2), "hammers is a share"),
    ],
)
def test_confusions_refuse(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@st.composite
def plans(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    annotators = draw(st.integers(1, 12))
    weights = torch.tensor(
        draw(st.lists(st.sampled_from([0.0, 1e-9, 0.5, 1.0, 7.0]), min_size=annotators, max_size=annotators))
    )
    able = int((weights > 0).sum())
    counts = torch.tensor(draw(st.lists(st.integers(0, able), max_size=9)), dtype=torch.int64)
    return counts, weights, draw(st.integers(0, 2**40))


@given(plans(), st.sampled_from([1, 30]), st.sampled_from([1, 1 << 22]))
@settings(deadline=None)
def test_annotators_of_an_item_are_distinct_and_allowed(plan, rounds: int, block: int) -> None:
    counts, weights, seed = plan
    truth = torch.arange(len(counts)) % 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation._simulate, "ROUNDS", rounds)
        patch.setattr(simulation._simulate, "BLOCK", block)
        a, b = (
            simulate(
                truth,
                symmetric_confusions(len(weights), 2),
                annotations_per_item=counts,
                selection=weights,
                seed=seed,
            )
            for _ in range(2)
        )
    assert_same(a, b)
    assert torch.equal(a.counts, counts) and a.item_id is not None and a.item_id.tolist() == list(range(len(counts)))
    cell = a.item * len(weights) + a.annotator
    assert bool((cell.diff() > 0).all())
    assert bool((weights[a.annotator] > 0).all())


@pytest.mark.parametrize(("rounds", "size"), [(30, 2), (1, 2), (30, 4)])
def test_selection_is_drawing_without_replacement(monkeypatch, rounds: int, size: int) -> None:
    """Frequencies of all sets, by drawing again, by the race, and by one after the other."""
    monkeypatch.setattr(simulation._simulate, "ROUNDS", rounds)
    weights = [8.0, 1, 1, 0.5, 3, 2, 0, 1]
    expected: Counter[tuple[int, ...]] = Counter()
    for order in itertools.permutations(range(8), size):
        chance, left = 1.0, sum(weights)
        for r in order:
            chance *= weights[r] / left if left else 0
            left -= weights[r]
        expected[tuple(sorted(order))] += chance
    items = 40_000
    a = simulate(
        torch.zeros(items, dtype=torch.int64),
        torch.ones(8, 1, 1),
        annotations_per_item=size,
        selection=weights,
        seed=1,
    )
    found = Counter(map(tuple, a.annotator.view(items, size).tolist()))
    for chosen, chance in expected.items():
        deviation = (chance * (1 - chance) / items) ** 0.5
        assert abs(found[chosen] / items - chance) <= 5 * deviation


def test_labels_follow_the_confusions() -> None:
    generator = torch.Generator().manual_seed(0)
    confusions = (2 * torch.randn(6, 3, 4, generator=generator, dtype=torch.float64)).softmax(2)
    confusions[2, 1] = torch.tensor([0.0, 1, 0, 0])
    confusions[3] = torch.tensor([0.5, 0, 0.5, 0])
    truth = torch.randint(0, 3, (60_000,), generator=generator)
    a = simulate(truth, confusions, annotations_per_item=2, seed=7)
    assert (a.num_annotators, a.num_classes) == (6, 4)
    estimate = empirical_confusion(torch.nn.functional.one_hot(truth, 3), a)
    assert float((estimate - confusions).abs().max()) < 0.03
    assert bool((estimate[confusions == 0] == 0).all())
    shares = torch.bincount(a.annotator, minlength=6) / a.num_annotations
    assert float((shares - 1 / 6).abs().max()) < 0.01


@pytest.mark.parametrize(("drawn", "annotator", "label"), [(0.0, 1, 1), (0.5, 2, 3)])
def test_draws_on_a_boundary_choose_nothing_impossible(monkeypatch, drawn, annotator, label) -> None:
    monkeypatch.setattr(torch, "rand", lambda *size, dtype, generator: torch.full(size, drawn, dtype=dtype))
    confusions = torch.tensor([0.0, 0.5, 0, 0.5]).expand(4, 1, 4)
    a = simulate([0], confusions, annotations_per_item=1, selection=[0.0, 1, 1, 1])
    assert (a.annotator.tolist(), a.label.tolist()) == ([annotator], [label])


def test_perfect_annotators_tell_the_truth() -> None:
    truth = torch.randint(0, 200, (500,))
    a = simulate(truth, torch.eye(200).expand(1000, -1, -1), annotations_per_item=3)
    assert torch.equal(a.label, truth[a.item])


def test_seeds() -> None:
    truth, confusions = torch.arange(50) % 3, symmetric_confusions(9, 3)
    assert_same(simulate(truth, confusions, seed=4), simulate(truth, confusions, seed=4))
    assert simulate(truth, confusions, seed=4).label.tolist() != simulate(truth, confusions, seed=5).label.tolist()
    generator = torch.Generator().manual_seed(4)
    first, second = (simulate(truth, confusions, seed=generator) for _ in range(2))
    assert_same(first, simulate(truth, confusions, seed=4))
    assert second.label.tolist() != first.label.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"truth": [0, 3]}, r"truth\[1\] is 3: classes are 0 to 2"),
        ({"truth": [-1, 0]}, r"truth\[0\] is -1"),
        ({"truth": [0.5, 1]}, "truth must be"),
        (
            {"confusions": torch.stack([torch.eye(3), 2 * torch.eye(3)])},
            r"confusions\[1, 0\] is no distribution",
        ),
        ({"confusions": torch.eye(3)}, r"confusions must be \[R, C, K\]"),
        ({"annotations_per_item": 3}, r"annotations_per_item\[0\] is 3: an item can have 0 to 2"),
        ({"annotations_per_item": [1, -1]}, r"annotations_per_item\[1\] is -1"),
        ({"annotations_per_item": [1, 1, 1]}, r"annotations_per_item must be an integer or \[2\]"),
        ({"annotations_per_item": 1.5}, "annotations_per_item must be an integer"),
        ({"selection": [1.0, 0], "annotations_per_item": 2}, r"\[0\] is 2: an item can have 0 to 1"),
        ({"selection": [1.0, -1]}, r"selection\[1\] is -1.0"),
        ({"selection": [1.0]}, r"selection must be \[2\]"),
    ],
)
def test_simulate_names_what_is_wrong(change, message) -> None:
    good = {"truth": [0, 2], "confusions": symmetric_confusions(2, 3), "annotations_per_item": 1}
    assert len(simulate(**good)) == 2
    with pytest.raises(ValueError, match=message):
        simulate(**{**good, **change})


def test_large_crowds_are_quick() -> None:
    """N x R would be half a billion numbers here."""
    truth = torch.arange(100_000) % 10
    confusions = symmetric_confusions(5000, 10)
    start = time.perf_counter()
    a = simulate(truth, confusions, selection=torch.distributions.Beta(1.5, 3).sample((5000,)))
    assert time.perf_counter() - start < 10
    assert a.num_annotations == 300_000
