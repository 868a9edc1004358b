"""An answer that is no class (num_labels = num_classes + 1): left out of votes, modelled by EM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.compare import assert_close

from crowdnal.data import Annotations, of_classes
from crowdnal.objectives import (
    CMM,
    DLDS,
    DLEM,
    DLWC,
    MBEM,
    CoNALEM,
    CrowdLayer,
    DLAggregate,
    DoctorNet,
    MajorityVote,
    MaxMIG,
    Objective,
    SoftBootstrap,
    SoftMajorityVote,
    UnionNet,
)

C, R, N = 3, 4, 60
TRUTH = torch.arange(N) % C


def crowd(unsure: bool) -> Annotations:
    """Right 4 times in 5; who is asked for class 2 is often unsure. Without: the same, those answers missing."""
    generator = torch.Generator().manual_seed(0)
    other = torch.randint(0, C, (N, R), generator=generator)
    labels = TRUTH[:, None].where(torch.rand(N, R, generator=generator) < 0.8, other)
    shrug = torch.rand(N, R, generator=generator) < torch.tensor([0.05, 0.05, 0.6])[TRUTH][:, None]
    dense = torch.where(shrug, C if unsure else -1, labels)
    return Annotations.from_dense(dense, num_classes=C + 1 if unsure else C)


@pytest.mark.parametrize("make", [MajorityVote, SoftMajorityVote, SoftBootstrap])
def test_votes_leave_it_out(make: type[Objective]) -> None:
    logits = torch.randn(N, C, generator=torch.Generator().manual_seed(1))
    told, plain = make(C, R, num_labels=C + 1), make(C, R)
    a, b = crowd(True), crowd(False)
    assert_close(told(logits, a), plain(logits, b))
    assert float(told.units(a)) == float(plain.units(b))
    kept = a.label < C
    assert torch.equal(told.log_likelihood(logits, a)[kept], plain.log_likelihood(logits, b))
    assert bool((told.log_likelihood(logits, a)[~kept] == 0).all())


@pytest.mark.parametrize("make", [DLEM, MBEM])
def test_em_learns_what_it_says(make: type[Objective]) -> None:
    objective, a = make(C, R, num_labels=C + 1, epochs_per_round=1), crowd(True)
    logits = 2.0 * torch.nn.functional.one_hot(TRUTH, C).float()
    objective.on_train_start(a, lambda: (logits, None))
    for epoch in range(1, 4):
        objective.on_epoch_start(epoch)
    unsure = objective.confusion()[:, :, C].mean(0)  # of each true class
    assert objective.confusion().shape == (R, C, C + 1) and float(unsure[2]) > 0.4 > 0.2 > float(unsure[:2].max())
    shrugs = Annotations([0, R], range(R), [C] * R, num_annotators=R, num_classes=C + 1)
    assert int(objective.posterior(torch.zeros(1, C), shrugs).argmax()) == 2
    assert objective(logits, a[list(range(N))]).isfinite()


def test_fewer_labels_than_classes_are_refused() -> None:
    for make in (MajorityVote, DLEM, MBEM):
        with pytest.raises(ValueError, match="num_labels=2 differs from num_classes=3"):
            make(C, R, num_labels=2)


@pytest.mark.parametrize("make", [DLDS, DLWC, DLAggregate, UnionNet, MaxMIG, CoNALEM, partial(CMM, num_groups=1)])
def test_who_starts_from_the_votes_starts_from_those_of_classes(make: Callable[..., Objective]) -> None:
    """And shows that class 2 meets "unsure" most, which is left out where the labels are aggregated first."""
    told, plain = make(C, R, num_labels=C + 1), make(C, R)
    logits = 2.0 * torch.nn.functional.one_hot(TRUTH, C).float()
    for objective, a in ((told, crowd(True)), (plain, crowd(False))):
        objective.on_train_start(a, lambda: (logits, None))
        objective.on_epoch_start(0)
    unsure = told.confusion()[:, :, C].mean(0)
    assert told.confusion().shape == (R, C, C + 1) and float(unsure[2]) > 1.5 * float(unsure[:2].max())
    if make in (DLDS, DLWC, DLAggregate):
        assert_close(told.targets, plain.targets)


@pytest.mark.parametrize("make", [DoctorNet, partial(CrowdLayer, variant="VW")])
def test_who_cannot_says_what_to_do(make: Callable[..., Objective]) -> None:
    with pytest.raises(ValueError, match=r"num_labels=4 differs.*of_classes\(annotations.*--missing"):
        make(C, R, num_labels=C + 1)
    a = of_classes(crowd(True), C)
    assert torch.equal(a.to_dense(), crowd(False).to_dense())
    assert CrowdLayer(C, R, variant="VW")(torch.zeros(N, C), a).isfinite()
