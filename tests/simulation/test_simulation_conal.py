"""The simulator of CoNAL's paper: labels from a common and from individual confusions."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_close
from torch import Tensor

from crowdnal.simulation import CommonAndIndividual, common_and_individual

N, C, R, D = 20_000, 6, 8, 5


def items(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(C, (N,), generator=generator)
    return truth, torch.randn(N, D, generator=generator)


def make(**options) -> CommonAndIndividual:
    return common_and_individual(*items(), R, C, **options)


def test_labels_follow_the_confusion_they_are_from() -> None:
    truth, _ = items()
    made = make(contrast=4.0)
    a, (common, individual) = made.annotations, (made.common, made.individual)
    assert len(a) == N and (a.counts == 3).all() and made.source.shape == made.omega.shape == (3 * N,)
    k = truth[a.item]

    def shares(of: Tensor) -> Tensor:
        counts = torch.zeros(C, C).index_put((k[of], a.label[of]), torch.ones(int(of.sum())), accumulate=True)
        return counts / counts.sum(1, keepdim=True)

    assert_close(shares(made.source), common, atol=0.02, rtol=0)
    for r in range(R):
        mine = a.annotator == r
        assert_close(shares(mine & ~made.source), individual[r], atol=0.05, rtol=0)
        assert_close(shares(mine & made.source), common, atol=0.05, rtol=0)
    likely = made.omega > made.omega.median()
    for half in (likely, ~likely):  # omega is the probability of the source
        assert made.source[half].double().mean() == pytest.approx(made.omega[half].mean().item(), abs=0.01)


@pytest.mark.parametrize("proportion", [0.0, 0.3, 0.7, 1.0])
def test_proportion(proportion: float) -> None:
    made = make(proportion=proportion, contrast=3.0)
    assert made.omega.mean().item() == pytest.approx(proportion, abs=1e-9)
    assert made.source.double().mean().item() == pytest.approx(proportion, abs=0.01)
    assert made.source.any() == (proportion > 0) and made.source.all() == (proportion == 1)


def test_contrast_spreads_omega() -> None:
    spread = [make(contrast=contrast).omega.std().item() for contrast in (0.0, 1.0, 8.0)]
    assert spread[0] < 1e-6 and 0.03 < spread[1] < 0.1 and spread[2] > 0.25


def test_patterns_and_strengths() -> None:
    made = make(common_strength=0.6, individual_strength=0.25)
    assert_close(made.common.diagonal(), torch.full((C,), 0.4))
    assert_close(made.individual.diagonal(dim1=1, dim2=2), torch.full((R, C), 0.75))
    assert ((made.common > 0).sum(1) == 2).all() and ((made.individual > 0).sum(2) == 2).all()
    swapped = make(pattern="symmetric", common_strength=0.6).common
    assert_close(swapped, swapped.t())
    assert_close(swapped.diagonal(), torch.full((C,), 0.4))
    truth = torch.arange(5)
    odd = common_and_individual(truth, torch.randn(5, 2), 3, pattern="symmetric").common
    assert sorted(odd.diagonal().tolist()) == pytest.approx([0.6] * 4 + [1.0])
    assert_close(odd.sum(1), torch.ones(5))


def test_seeds_and_sizes() -> None:
    one, same, other = make(seed=1), make(seed=1), make(seed=2)
    assert torch.equal(one.annotations.label, same.annotations.label) and torch.equal(one.source, same.source)
    assert not torch.equal(one.annotations.label, other.annotations.label)
    nothing = common_and_individual(torch.empty(0, dtype=torch.long), torch.empty(0, 2), 3, 2)
    assert nothing.annotations.num_annotations == 0 and len(nothing.omega) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "random"}, "pattern='random'"),
        ({"common_strength": 1.5}, "common_strength"),
        ({"individual_strength": -0.1}, "individual_strength"),
        ({"proportion": 2}, "proportion"),
        ({"annotations_per_item": R + 1}, "annotations_per_item"),
    ],
)
def test_errors(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)
    with pytest.raises(ValueError, match="features must be"):
        common_and_individual(torch.zeros(3, dtype=torch.long), torch.zeros(2, 4))
