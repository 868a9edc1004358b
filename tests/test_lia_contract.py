"""LIA keeps the contract of all objectives; its errors say what does not fit."""

from __future__ import annotations

from typing import Any

import contract
import pytest
import torch
from small_crowd import ANNOTATOR, INDPTR, LABEL, C, R, batch, logits_of, perturbed
from test_lia import FEATURES, OPTIONS, PEOPLE, PHASES, D, crowd, make
from test_methods import Largest

from crowdnal import LIA, lia_modules
from crowdnal.annotations import Annotations


def prepared(*sizes: int, **options: Any) -> LIA:
    """Without features: the checks that all objectives share give none."""
    options = {"instance": "embedding", "num_items": 300, "feature_dim": None, "rounds": 0, **options}
    return make(*sizes, **options)


@pytest.mark.parametrize("finetune", ["item", "annotation"])
def test_contract_of_all_objectives(finetune: str, monkeypatch: pytest.MonkeyPatch) -> None:
    makers = {"lia": lambda *sizes, **options: prepared(*sizes, finetune=finetune, **options)}
    # these annotations have no item_id: any item has the embedding of its place
    monkeypatch.setattr(lia_modules.PairModel, "_item_ids", lambda self, a: torch.arange(len(a), device=a.device))
    contract.check(makers, "lia", contract.EVERYONE)


@pytest.mark.parametrize("phase", PHASES)
def test_unlabelled_items_count_nothing_and_empty_batches_are_zero(phase: str) -> None:
    objective = make(**PHASES[phase]).double()
    objective.on_train_start(batch())
    logits, x = logits_of(), FEATURES.clone()
    expected = objective(logits, batch(), x)
    logits[1], x[1] = torch.nan, torch.nan
    loss = objective(logits.requires_grad_(), batch(), x)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert all(p.grad.isfinite().all() for p in objective.parameters()) and (logits.grad[1] == 0).all()
    for items in (0, 3):
        nothing = Annotations([0] * (items + 1), [], [], num_annotators=R, num_classes=C, item_id=range(items))
        objective.zero_grad()
        logits = torch.randn(items, C, dtype=torch.float64, requires_grad=True)
        loss = objective(logits, nothing, torch.randn(items, D))
        loss.backward()
        assert loss == 0 and (logits.grad == 0).all()
        assert all(p.grad is not None and (p.grad == 0).all() for p in objective.parameters())


@pytest.mark.parametrize(("name", "phase"), [("default", "em"), ("default", "annotation"), ("embedding", "item")])
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
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got, parameters), grads)
    half = make(**options).bfloat16()
    half.on_train_start(annotations)
    loss = half(logits.detach().bfloat16(), annotations, x.bfloat16())
    loss.backward()
    assert loss.dtype == torch.float32 and all(p.grad.dtype == torch.bfloat16 for p in half.parameters())


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
