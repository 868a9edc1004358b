"""Low-rank confusions recover planted crowds, and from fewer labels than full ones."""

from __future__ import annotations

import pytest
import torch
from support.low_rank import RANK
from support.planted import annotate, blobs, fit, planted
from support.small_crowd import C
from support.wide_crowd import habitual, wide_annotations, wide_blobs

from crowdnal.objectives import MajorityVote, OverparametrizedCrowdLayer, TraceRegularized

ERRORS = {"crowd-layer": 0.012, "geocrowdnet W": 0.006}  # W pulls the confusions apart


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["crowd-layer", "crowd-layer-over", "trace", "geocrowdnet", "geocrowdnet W"])
def test_low_rank_recovers_planted_confusions_and_beats_majority_vote(name):
    x, truth = blobs()
    confusion = planted()
    annotations = annotate(truth, confusion, 5)
    torch.manual_seed(2)
    kwargs = {"volume_weight": 0.01} if "geocrowdnet" in name else {}
    objective = RANK[name](C, len(confusion), **kwargs)
    classifier, votes = (fit(o, x, annotations) for o in (objective, MajorityVote(C, len(confusion))))
    test_x, test_truth = blobs(seed=5)
    accuracy, baseline = ((c(test_x).argmax(-1) == test_truth).float().mean().item() for c in (classifier, votes))
    assert accuracy > 0.95 and accuracy > baseline + 0.2
    assert (objective.confusion() - confusion).pow(2).mean() < ERRORS.get(name, 0.004)
    reliability = confusion.diagonal(dim1=1, dim2=2).mean(-1)
    assert torch.corrcoef(torch.stack([objective.reliability(), reliability]))[0, 1] > 0.97


@pytest.mark.slow
def test_low_rank_needs_fewer_labels():
    """30 annotators, 10 classes, 60 labels each: 90 free cells for 60 labels, or 29 of a diagonal and a profile."""
    confusion = habitual(30, 10)
    x, truth = wide_blobs(600, 10)
    annotations = wide_annotations(truth, confusion, 3)
    errors = {}
    for rank in (1, None):
        torch.manual_seed(2)
        objective = TraceRegularized(10, 30, rank=rank)
        classifier = fit(objective, x, annotations)
        errors[rank] = (objective.confusion() - confusion).pow(2).sum((1, 2)).mean().item() / 10
        assert (classifier(x).argmax(-1) == truth).float().mean() > 0.9
    assert errors[1] < 0.08 and errors[1] < 0.7 * errors[None]


@pytest.mark.slow
def test_two_matrices_do_not_exchange_classes_whatever_the_start():
    """Most labels name class 0: a start with much off the diagonal ends in another order of the classes."""
    x, truth = blobs()
    confusion = planted()
    annotations = annotate(truth, confusion, 5)
    for seed in (1, 2, 4, 5):
        torch.manual_seed(seed)
        objective = OverparametrizedCrowdLayer(C, len(confusion), rank=1)
        assert (fit(objective, x, annotations)(x).argmax(-1) == truth).float().mean() > 0.95, seed
