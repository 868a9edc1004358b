"""Every objective against plain PyTorch, and the contract all of them keep."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from small_crowd import (
    ANNOTATOR,
    CROWD,
    INDPTR,
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
@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "item_mean"])
@pytest.mark.parametrize("name", MAKERS)
def test_loss_and_gradients_equal_plain_pytorch(name, reduction, weighted):
    objective = perturbed(MAKERS[name](C, R, reduction=reduction))
    annotations = batch(weighted)
    weight = [1.0] * 6 if annotations.weight is None else annotations.weight.tolist()
    inputs = [logits_of().requires_grad_(), *objective.parameters()]
    ours, plain = objective(inputs[0], annotations), plain_loss(objective, inputs[0], weight)
    torch.testing.assert_close(ours, plain)
    upstream = torch.arange(1, 1 + ours.numel(), dtype=torch.float64).view(ours.shape) * 0.7
    expected = torch.autograd.grad(plain, inputs, upstream, materialize_grads=True)
    torch.testing.assert_close(torch.autograd.grad(ours, inputs, upstream), expected)


# The contract


@pytest.mark.parametrize("reduction", ["mean", "sum", "item_mean"])
@pytest.mark.parametrize("items", [0, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_empty_batch_is_zero_with_zero_gradients(name, items, reduction):
    objective = MAKERS[name](C, R, reduction=reduction)
    nothing = Annotations([0] * (items + 1), [], [], num_annotators=R, num_classes=C)
    logits = torch.randn(items, C, requires_grad=True)
    loss = objective(logits, nothing)
    assert loss.item() == 0
    loss.backward()
    for tensor in (logits, *objective.parameters()):
        assert tensor.grad is not None and torch.equal(tensor.grad, torch.zeros_like(tensor))


@pytest.mark.parametrize("name", MAKERS)
def test_backward_twice_and_scaled_upstream(name):
    objective = MAKERS[name](C, R)
    logits = logits_of(dtype=torch.float32).requires_grad_()
    loss = objective(logits, batch())
    loss.backward(retain_graph=True)
    once = logits.grad.clone()
    (2 * loss).backward()
    torch.testing.assert_close(logits.grad, 3 * once)


@pytest.mark.parametrize("name", MAKERS)
def test_inputs_are_not_changed(name):
    objective = MAKERS[name](C, R)
    logits, annotations = logits_of(dtype=torch.float32), batch(weighted=True)
    before = logits.clone(), copy.deepcopy(annotations), copy.deepcopy(objective.state_dict())
    objective(logits, annotations)
    objective.log_likelihood(logits, annotations)
    objective.posterior(logits, annotations)
    assert torch.equal(logits, before[0])
    for field in ("indptr", "annotator", "label", "weight"):
        assert torch.equal(getattr(annotations, field), getattr(before[1], field))
    assert all(torch.equal(value, before[2][key]) for key, value in objective.state_dict().items())


@pytest.mark.parametrize("name", MAKERS)
def test_no_gradient_asked_none_given(name):
    objective = MAKERS[name](C, R).requires_grad_(False)
    assert not objective(logits_of(dtype=torch.float32), batch()).requires_grad


@pytest.mark.parametrize("layout", ["transposed", "stride 0"])
@pytest.mark.parametrize("name", MAKERS)
def test_strided_logits(name, layout):
    objective = perturbed(MAKERS[name](C, R))
    logits = logits_of(C).t()[:, :C] if layout == "transposed" else logits_of(1).expand(4, C)
    logits = logits if logits.shape[0] == 4 else torch.cat([logits, logits[:1]]).t().contiguous().t()
    assert logits.shape == (4, C)
    torch.testing.assert_close(objective(logits, batch()), objective(logits.contiguous(), batch()))


@pytest.mark.parametrize("name", MAKERS)
def test_confident_bfloat16_logits_are_computed_in_float32(name):
    objective = MAKERS[name](C, R)
    logits = logits_of(dtype=torch.bfloat16, scale=100).requires_grad_()
    loss = objective(logits, batch())
    loss.backward()
    assert loss.dtype == torch.float32 and math.isfinite(loss.item())
    assert logits.grad.dtype == torch.bfloat16 and logits.grad.isfinite().all()
    torch.testing.assert_close(loss, objective(logits.detach().float(), batch()))


@pytest.mark.parametrize("name", CROWD)
def test_bfloat16_parameters(name):
    objective = MAKERS[name](C, R).bfloat16()
    loss = objective(logits_of(dtype=torch.bfloat16), batch())
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.grad.dtype == torch.bfloat16 for p in objective.parameters())
    confusion = objective.confusion()
    torch.testing.assert_close(confusion.sum(-1), torch.ones(R, C))


@pytest.mark.parametrize("name", MAKERS)
def test_autocast_does_not_touch_the_loss(name):
    objective = perturbed(MAKERS[name](C, R), torch.float32)
    logits = logits_of(dtype=torch.float32).requires_grad_()
    plain = objective(logits, batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = objective(logits, batch())
        assert torch.equal(objective.log_likelihood(logits, batch()), objective.log_likelihood(logits, batch()).float())
    assert torch.equal(mixed, plain) and mixed.dtype == torch.float32


@pytest.mark.parametrize("name", MAKERS)
def test_dense_targets(name):
    objective = perturbed(MAKERS[name](C, R))
    dense = torch.tensor([[1, -1, 0, -1], [-1, -1, -1, -1], [-1, 2, 2, -1], [-1, 0, -1, -1]])
    annotations = Annotations.from_dense(dense, num_classes=C)
    for method in (objective.loss, objective.log_likelihood, objective.posterior):
        torch.testing.assert_close(method(logits_of(), dense), method(logits_of(), annotations))


@pytest.mark.parametrize("name", MAKERS)
def test_one_item_one_annotator(name):
    objective = MAKERS[name](C, 1)
    one = Annotations([0, 1], [0], [2], num_annotators=1, num_classes=C)
    logits = logits_of(1, torch.float32)
    assert objective(logits, one).shape == ()
    assert objective.log_likelihood(logits, one).shape == (1,)
    assert objective.posterior(logits, one).shape == (1, C)


@pytest.mark.parametrize("name", MAKERS)
def test_errors_say_what_does_not_fit(name):
    objective = MAKERS[name](C, R)
    logits = logits_of(dtype=torch.float32)
    with pytest.raises(ValueError, match="3 rows but annotations has 4 items"):
        objective(logits[:3], batch())
    with pytest.raises(ValueError, match=r"\[4, 2\].*num_classes=3"):
        objective(logits[:, :2], batch())
    with pytest.raises(ValueError, match="int64"):
        objective(logits.long(), batch())
    with pytest.raises(ValueError, match=r"\[3\]"):
        objective(logits[0], batch())
    with pytest.raises(ValueError, match="annotators"):
        objective(logits, Annotations(INDPTR, ANNOTATOR, LABEL, num_annotators=R + 1, num_classes=C))
    with pytest.raises(ValueError, match="classes"):
        objective(logits, Annotations(INDPTR, ANNOTATOR, LABEL, num_annotators=R, num_classes=C + 1))
    with pytest.raises(ValueError, match="meta"):
        objective(logits.to("meta"), batch())


@pytest.mark.parametrize("name", CROWD)
def test_state_dict_round_trip_and_parameters(name):
    objective = perturbed(MAKERS[name](C, R), torch.float32)
    assert {key for key, _ in objective.named_parameters()} == set(objective.state_dict()) != set()
    assert not list(objective.buffers())
    fresh = MAKERS[name](C, R)
    assert not torch.allclose(fresh.confusion(), objective.confusion())
    fresh.load_state_dict(objective.state_dict())
    assert torch.equal(fresh.confusion(), objective.confusion())


@pytest.mark.parametrize("name", CROWD)
def test_an_optimizer_step_reaches_who_labelled_and_nobody_else(name):
    objective = MAKERS[name](C, R)
    before = objective.confusion()
    optimizer = torch.optim.SGD(objective.parameters(), lr=1.0)
    if isinstance(objective, TraceRegularized):
        objective.trace_weight = 0.0
    objective(logits_of(dtype=torch.float32), batch()).backward()
    optimizer.step()
    moved = (objective.confusion() - before).abs().amax((1, 2))
    assert (moved[:3] > 1e-6).all() and moved[3] == 0


@pytest.mark.parametrize("name", CROWD)
def test_confusion_is_detached_stochastic_and_starts_diagonal(name):
    objective = MAKERS[name](C, R)
    confusion = objective.confusion()
    assert confusion.shape == (R, C, C) and not confusion.requires_grad
    torch.testing.assert_close(confusion.sum(-1), torch.ones(R, C))
    if "VB" in name:  # softmax(e_k + 0)
        torch.testing.assert_close(confusion[0], torch.eye(C).softmax(-1))
    assert (confusion.argmax(-1) == torch.arange(C)).all()
    torch.testing.assert_close(objective.reliability(), confusion.diagonal(dim1=1, dim2=2).mean(-1))
    before = confusion.clone()
    confusion.zero_()  # a copy: users may write into it
    assert torch.equal(objective.confusion(), before)


@pytest.mark.parametrize("name", CROWD)
def test_confusion_is_the_likelihood_of_a_certain_classifier(name):
    """Row k, column y = probability of label y where the truth is k: not its transpose."""
    objective = perturbed(MAKERS[name](C, R))
    certain = 1e4 * torch.eye(C, dtype=torch.float64)
    everything = Annotations(
        [0, R * C, 2 * R * C, 3 * R * C],
        [r for _ in range(C) for r in range(R) for _ in range(C)],
        [y for _ in range(C) for _ in range(R) for y in range(C)],
        num_annotators=R,
        num_classes=C,
    )
    probabilities = objective.log_likelihood(certain, everything).exp().view(C, R, C)
    torch.testing.assert_close(probabilities.transpose(0, 1), objective.confusion())
    assert not torch.allclose(objective.confusion(), objective.confusion().transpose(1, 2), atol=1e-3)


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
    torch.testing.assert_close(got, expected.detach())


@pytest.mark.parametrize("name", CROWD)
def test_posterior_uses_the_shown_confusion(name):
    objective = perturbed(MAKERS[name](C, R))
    logits, confusion = logits_of(), objective.confusion()
    expected = logits.softmax(-1)
    for i in range(4):
        for n in range(INDPTR[i], INDPTR[i + 1]):
            expected[i] = expected[i] * confusion[ANNOTATOR[n], :, LABEL[n]]
    expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(objective.posterior(logits, batch()), expected)


@pytest.mark.parametrize("labels", [2, 5])
def test_label_set_of_another_size(labels):
    annotations = Annotations([0, 2], [0, 1], [1, labels - 1], num_annotators=R, num_classes=labels)
    for objective in (CrowdLayer(C, R, num_labels=labels), TraceRegularized(C, R, num_labels=labels)):
        logits = torch.randn(1, C, requires_grad=True)
        objective(logits, annotations).backward()
        assert logits.grad.abs().sum() > 0
        assert objective.confusion().shape == (R, C, labels)
        torch.testing.assert_close(objective.confusion().sum(-1), torch.ones(R, C))
        diagonal = torch.stack([objective.confusion()[:, k, k] for k in range(min(C, labels))], 1)
        torch.testing.assert_close(objective.reliability(), diagonal.sum(1) / C)
        assert objective.posterior(logits, annotations).shape == (1, C)
    for make in (
        MajorityVote,
        SoftMajorityVote,
        partial(CrowdLayer, variant="VW"),
        partial(CrowdLayer, variant="VB"),
    ):
        with pytest.raises(ValueError, match=f"num_labels={labels} differs from num_classes=3"):
            make(C, R, num_labels=labels)


@pytest.mark.parametrize("name", MAKERS)
def test_bitwise_repeatable_over_runs_and_threads(name):
    generator = torch.Generator().manual_seed(3)
    dense = torch.randint(-1, C, (300, 40), generator=generator)
    annotations = Annotations.from_dense(dense, num_classes=C)
    logits = torch.randn(300, C, generator=generator)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            objective = MAKERS[name](C, 40)
            inputs = [logits.clone().requires_grad_(), *objective.parameters()]
            loss = objective(inputs[0], annotations)
            results.append([loss.detach(), *torch.autograd.grad(loss, inputs)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


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


@pytest.mark.parametrize("name", MAKERS)
def test_hooks_and_repr(name):
    objective = MAKERS[name](C, R)
    objective.on_train_start()
    objective.on_train_start(batch(), lambda: (logits_of(), None))
    objective.on_epoch_start(0)
    objective.on_epoch_end(0)
    assert "num_classes=3, num_annotators=4, reduction='mean'" in repr(objective)
