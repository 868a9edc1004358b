"""LIA keeps the contract of all objectives; its errors say what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.attached import check_compiled, labels, mlp
from support.compare import assert_close
from support.lia import FEATURES, OPTIONS, PEOPLE, PHASES, D, crowd, make
from support.memory import Largest
from support.small_crowd import ANNOTATOR, INDPTR, LABEL, C, R, batch, logits_of, perturbed
from torch import nn

from crowdnal import LIA, LIAML, ObjectiveCallback, attach
from crowdnal.data import Annotations


@pytest.mark.parametrize("phase", PHASES)
def test_unlabelled_items_count_nothing_and_empty_batches_are_zero(phase: str) -> None:
    objective = make(**PHASES[phase]).double()
    objective.on_train_start(batch())
    logits, x = logits_of(), FEATURES.clone()
    expected = objective(logits, batch(), x)
    logits[1], x[1] = torch.nan, torch.nan
    loss = objective(logits.requires_grad_(), batch(), x)
    loss.backward()
    assert_close(loss, expected)
    assert all(p.grad.isfinite().all() for p in objective.parameters()) and (logits.grad[1] == 0).all()
    for items in (0, 3):
        nothing = Annotations([0] * (items + 1), [], [], num_annotators=R, num_classes=C, item_id=range(items))
        objective.zero_grad()
        logits = torch.randn(items, C, dtype=torch.float64, requires_grad=True)
        loss = objective(logits, nothing, torch.randn(items, D))
        loss.backward()
        assert loss == 0 and (logits.grad == 0).all()
        assert all(p.grad is not None and (p.grad == 0).all() for p in objective.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "phase"), [("default", "annotation"), ("embedding", "em")])
def test_compiled_and_bfloat16(name: str, phase: str) -> None:
    options = {**OPTIONS[name], **PHASES[phase]}
    objective, annotations = perturbed(make(**options), torch.float32), crowd(False, C).prepare()
    objective.on_train_start(annotations)
    logits, x = logits_of(dtype=torch.float32).requires_grad_(), FEATURES.float()
    expected = objective(logits, annotations, x)
    parameters = [p for p in objective.parameters() if p.requires_grad]
    grads = torch.autograd.grad(expected, parameters)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(objective(logits, annotations, x), expected)
    torch.compiler.reset()
    got = torch.compile(objective, fullgraph=True, backend="aot_eager")(logits, annotations, x)
    assert_close(got, expected)
    assert_close(torch.autograd.grad(got, parameters), grads)
    half = make(**options).bfloat16()
    half.on_train_start(annotations)
    loss = half(logits.detach().bfloat16(), annotations, x.bfloat16())
    loss.backward()
    assert loss.dtype == torch.float32 and all(p.grad.dtype == torch.bfloat16 for p in half.parameters())


@pytest.mark.slow
def test_compiled_once_whatever_the_number_of_annotations() -> None:
    annotators = 40  # more than a batch has annotations
    torch.manual_seed(0)
    model = attach(mlp(), LIA(4, annotators, feature_dim=5, rounds=0), features=nn.Identity())
    check_compiled(model, lambda seed: labels(5, seed).given_by(labels(5, seed).annotator, annotators).prepare())


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_no_parameter_is_unused_under_ddp(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(attach(mlp(), LIA(4, 6, feature_dim=5), features=nn.Identity()))
        x, annotations = torch.randn(5, 5), labels(5)
        callback = ObjectiveCallback(model, [(x, annotations)], annotations)
        for epoch in range(2):  # the second raises if the first left a parameter without a gradient
            callback.on_epoch_start(epoch)
            model(x, annotations).loss.backward()
        assert all(p.grad is not None for p in model.parameters()) and len(callback.history) == 1
    finally:
        dist.destroy_process_group()


def test_tags_keep_results_bitwise_repeatable_with_threads() -> None:
    generator = torch.Generator().manual_seed(3)
    annotations = Annotations.from_dense(torch.randint(-1, 2, (3000, 20), generator=generator), num_classes=2)
    logits, threads, results = torch.randn(3000, 2, generator=generator), torch.get_num_threads(), []
    try:
        torch.set_num_threads(2)
        for _ in range(3):
            torch.manual_seed(0)
            objective = LIAML(2, 20, num_tags=10, instance="embedding", num_items=3000, rounds=0)
            inputs = [logits.clone().requires_grad_(), *objective.parameters()]
            loss = objective(inputs[0], annotations)
            results.append([loss.detach(), *torch.autograd.grad(loss, inputs)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_step_builds_tensors_of_the_batch_s_annotators_only() -> None:
    objective = make(annotators=50_000, rounds=0)
    few = Annotations([0, 3], [3, 49_999, 3], [0, 1, 1], num_annotators=50_000, num_classes=C).prepare()
    with torch.no_grad(), Largest() as largest:
        objective(torch.randn(1, C), few, torch.randn(1, D))
    assert largest.elements <= 50_000 * 4  # the embeddings, in place: what is made of them is of two annotators


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": -1}, "rounds=-1"),
        ({"finetune": "all"}, "finetune='all'.*annotation"),
        ({"rounds": 0, "finetune": "none"}, "nothing to train"),
        ({"competence_precision": -1.0}, "competence_precision=-1.0"),
        ({"competence_precision": float("nan")}, "competence_precision=nan"),
        ({"instance": "pixels"}, "instance='pixels'"),
        ({"instance": "embedding"}, "num_items=None"),
        ({"num_items": 4}, "num_items=4"),
        ({"num_latents": 0}, "num_latents=0"),
        ({"hidden_dim": True}, "hidden_dim=True"),
        ({"num_layers": -1}, "num_layers=-1"),
        ({"epochs_per_round": 0}, "epochs_per_round=0"),
        ({"annotator_features": PEOPLE[:2]}, "annotator_features"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_errors_name_the_item() -> None:
    objective = make(**OPTIONS["embedding"], rounds=0)
    logits = logits_of(dtype=torch.float32)
    with pytest.raises(ValueError, match=r"item_id of item 0 is 9.*num_items=4"):
        sizes = {"num_annotators": R, "num_classes": C}
        objective(logits, Annotations(INDPTR, ANNOTATOR, LABEL, **sizes, item_id=[9, 1, 2, 3]))
    with pytest.raises(ValueError, match="no item_id and 2 items"):
        objective(logits[:2], Annotations([0, 1, 2], [0, 1], [0, 1], num_annotators=R, num_classes=C))
    with pytest.raises(ValueError, match=r"length 4.*feature_dim=5"):
        make(rounds=0)(logits, batch(), FEATURES[:, 1:].float())
