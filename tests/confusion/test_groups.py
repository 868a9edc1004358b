"""Confusions that groups of annotators share."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.compare import assert_close
from support.planted import fit
from support.small_crowd import C, R, batch, logits_of, perturbed
from support.wide_crowd import wide_annotations, wide_blobs

from crowdnal.objectives import CrowdLayer, GeoCrowdNet, MajorityVote, OverparametrizedCrowdLayer, TraceRegularized

MAKERS = {
    "crowd-layer": CrowdLayer,
    "crowd-layer rank": partial(CrowdLayer, rank=2),
    "crowd-layer VW+B": partial(CrowdLayer, variant="VW+B"),
    "over": OverparametrizedCrowdLayer,
    "over softmax rank": partial(OverparametrizedCrowdLayer, hidden="softmax", rank=2),
    "trace": TraceRegularized,
    "trace batch rank": partial(TraceRegularized, scope="batch", rank=2),
    "geocrowdnet W": partial(GeoCrowdNet, volume="W"),
    "geocrowdnet W rank": partial(GeoCrowdNet, volume="W", rank=2),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_group_is_annotators_whose_matrices_are_equal(name):
    groups = torch.tensor([1, 0, 1, 2])
    make = MAKERS[name]
    for reduction in ("mean", "item_mean", "sum", "none"):
        shared = perturbed(make(C, R, groups=groups, reduction=reduction))
        own = make(C, R, reduction=reduction).double()
        given = dict(shared.named_parameters())
        with torch.no_grad():
            for key, parameter in own.named_parameters():
                assert given[key].shape[0] == 3
                parameter.copy_(given[key][groups])
        logits = logits_of().requires_grad_()
        losses = [o(logits, batch(True)) for o in (shared, own)]
        assert_close(*losses)
        grads = [
            torch.autograd.grad(loss.sum(), [logits, *o.parameters()], materialize_grads=True)
            for loss, o in zip(losses, (shared, own), strict=True)
        ]
        assert_close(grads[0][0], grads[1][0])
        for got, each in zip(grads[0][1:], grads[1][1:], strict=True):
            assert_close(got, torch.zeros_like(got).index_add(0, groups, each))
        assert_close(shared.confusion(), own.confusion())
        assert_close(shared.reliability(), own.reliability())
        for method in ("posterior", "log_likelihood"):
            assert_close(*(getattr(o, method)(logits, batch(True)) for o in (shared, own)))


def test_sparse_gradients_of_groups():
    groups = [1, 0, 1, 2]
    for make in (CrowdLayer, partial(TraceRegularized, scope="batch")):
        dense, sparse = (make(C, R, groups=groups, sparse_grad=flag) for flag in (False, True))
        for o in (dense, sparse):
            o(logits_of(dtype=torch.float32), batch()).backward()
        assert sparse.annotators.weight.grad.is_sparse
        assert_close(sparse.annotators.weight.grad.to_dense(), dense.annotators.weight.grad)


def test_groups_are_saved_and_counted():
    objective = perturbed(CrowdLayer(C, R, groups=[2, 0, 2, 1]), torch.float32)
    assert "groups=3" in repr(objective) and objective.annotators.weight.shape == (3, C, C)
    fresh = CrowdLayer(C, R, groups=[0, 1, 2, 0])
    fresh.load_state_dict(objective.state_dict())
    assert torch.equal(fresh.confusion(), objective.confusion())


def test_groups_of_annotators_with_few_labels_are_learned_together():
    """60 annotators, 30 labels each: a third are good, the others call most things their kind's favourite."""
    kinds = torch.arange(60) % 3
    right = torch.tensor([0.9, 0.3, 0.4])[:, None, None]
    favourite = torch.full((3, 1, 6), 1 / 6)
    favourite[1:] = torch.eye(6)[0]
    confusion = (right * torch.eye(6) + (1 - right) * favourite)[kinds]
    x, truth = wide_blobs(600, 6)
    annotations = wide_annotations(truth, confusion, 3)
    test_x, test_truth = wide_blobs(1000, 6, seed=3)
    errors, accuracies = [], []
    for objective in (TraceRegularized(6, 60, groups=kinds), TraceRegularized(6, 60), MajorityVote(6, 60)):
        classifier = fit(objective, x, annotations)
        accuracies.append((classifier(test_x).argmax(-1) == test_truth).float().mean().item())
        if objective.models_annotators:
            errors.append((objective.confusion() - confusion).pow(2).mean().item())
    assert errors[0] < 0.004 and errors[0] < 0.3 * errors[1]
    assert accuracies[0] > 0.95 and accuracies[0] > accuracies[2] + 0.1
