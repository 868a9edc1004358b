"""Every objective against plain PyTorch, and the contract all of them keep."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.compare import assert_close
from support.small_crowd import (
    LABEL,
    MAKERS,
    C,
    R,
    batch,
    logits_of,
    perturbed,
    plain_loss,
    plain_terms,
)
from torch.nn import functional as F

from crowdnal.data import Annotations
from crowdnal.objectives import CrowdLayer, MajorityVote, SoftMajorityVote, TraceRegularized


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "item_mean", "per_item"])
@pytest.mark.parametrize("name", MAKERS)
def test_loss_and_gradients_equal_plain_pytorch(name, reduction, weighted):
    objective = perturbed(MAKERS[name](C, R, reduction=reduction))
    annotations = batch(weighted)
    weight = [1.0] * 6 if annotations.weight is None else annotations.weight.tolist()
    inputs = [logits_of().requires_grad_(), *objective.parameters()]
    ours, plain = objective(inputs[0], annotations), plain_loss(objective, inputs[0], weight)
    assert_close(ours, plain)
    upstream = torch.arange(1, 1 + ours.numel(), dtype=torch.float64).view(ours.shape) * 0.7
    expected = torch.autograd.grad(plain, inputs, upstream, materialize_grads=True)
    assert_close(torch.autograd.grad(ours, inputs, upstream), expected)


# The contract


@pytest.mark.parametrize("name", MAKERS)
def test_log_likelihood_is_minus_the_unweighted_unreduced_loss(name):
    objective = perturbed(MAKERS[name](C, R))
    logits = logits_of().requires_grad_()
    got = objective.log_likelihood(logits, batch(weighted=True))
    assert not got.requires_grad and got.shape == (6,)
    if isinstance(objective, MajorityVote):
        expected = F.log_softmax(logits, 1)[[0, 0, 2, 2, 2, 3], LABEL]
    else:
        expected = -torch.stack(plain_terms(objective, logits)[0])
    assert_close(got, expected.detach())


@pytest.mark.parametrize("labels", [2, 5])
def test_label_set_of_another_size(labels):
    annotations = Annotations([0, 2], [0, 1], [1, labels - 1], num_annotators=R, num_classes=labels)
    for objective in (CrowdLayer(C, R, num_labels=labels), TraceRegularized(C, R, num_labels=labels)):
        logits = torch.randn(1, C, requires_grad=True)
        objective(logits, annotations).backward()
        assert logits.grad.abs().sum() > 0
        assert objective.confusion().shape == (R, C, labels)
        assert_close(objective.confusion().sum(-1), torch.ones(R, C))
        diagonal = torch.stack([objective.confusion()[:, k, k] for k in range(min(C, labels))], 1)
        assert_close(objective.reliability(), diagonal.sum(1) / C)
        assert objective.posterior(logits, annotations).shape == (1, C)
    votes = (MajorityVote, SoftMajorityVote) if labels < C else ()  # labels behind the classes are no votes
    for make in (*votes, partial(CrowdLayer, variant="VW"), partial(CrowdLayer, variant="VB")):
        with pytest.raises(ValueError, match=f"num_labels={labels} differs from num_classes=3"):
            make(C, R, num_labels=labels)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_classes": 0}, "num_classes=0"),
        ({"num_annotators": 2.0}, "num_annotators=2.0"),
        ({"num_labels": -1}, "num_labels=-1"),
        ({"reduction": "avg"}, "reduction='avg'.*item_mean"),
    ],
)
def test_bad_sizes(kwargs, message):
    with pytest.raises(ValueError, match=message):
        CrowdLayer(**{"num_classes": C, "num_annotators": R, **kwargs})


@pytest.mark.parametrize("option", ["variant", "normalization", "scope", "trace_weight", "warmup_epochs"])
def test_bad_options(option):
    cls = CrowdLayer if option == "variant" else TraceRegularized
    with pytest.raises(ValueError, match=f"{option}="):
        cls(C, R, **{option: -1 if option in ("trace_weight", "warmup_epochs") else "nonsense"})
