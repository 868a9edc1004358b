"""CCC's steps: the meta gradient against create_graph, and what the extra passes must leave alone."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import timm
import torch
from support import coupled
from support.compare import assert_close
from support.coupled import C, G, R, expected_correction, optimizers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import crowdnal
from crowdnal.ccc import step as steps


def batch(first: int = 0, size: int = 16, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Tensor, Any]:
    rows = torch.arange(first, first + size)
    return coupled.images(dtype)[rows], coupled.annotations(**options)[rows]


def relative(found: Tensor, wanted: Tensor) -> float:
    assert wanted.abs().max() > 0
    return float((found - wanted).abs().max() / wanted.abs().max())


def test_sums_over_an_items_annotators_as_the_paper_prints_them() -> None:
    """Equations 6, 10 and 12: 1/N sum_i sum_r."""
    ccc, as_code = coupled.coupled(meta="exact"), coupled.coupled(meta="exact")
    for model in (ccc.model_a, ccc.model_b):
        model.objective.reduction = "per_item"
    given = batch()
    want = expected_correction(ccc, 0, given, lambda name: 0.1)
    found, other = (made.step(given, *optimizers(made)) for made in (ccc, as_code))
    assert relative(found.correction_a, want) < 1e-10 and relative(other.correction_a, want) > 1e-3


@pytest.mark.parametrize("scope", ["all", "head"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("weighted", [False, True])
def test_correction_is_that_of_create_graph(scope: str, dropout: float, weighted: bool) -> None:
    ccc = coupled.coupled(scope=scope, dropout=dropout, meta="exact")
    given = batch(weighted=weighted)
    want = expected_correction(ccc, 0, given, lambda name: 0.1)
    found = ccc.step(given, *optimizers(ccc)).correction_a
    assert found.shape == (G, C, C) and relative(found, want) < 1e-10


def test_second_model_and_its_own_meta_batch() -> None:
    ccc = coupled.coupled()
    given = batch()
    state = torch.get_rng_state()
    want = expected_correction(ccc, 1, given, lambda name: 0.1)
    torch.set_rng_state(state)
    assert relative(ccc.step(given, *optimizers(ccc)).correction_b, want) < 1e-10


def test_learning_rates_are_those_of_the_moment() -> None:
    ccc = coupled.coupled()
    groups = [
        [{"params": [*m.backbone.head.parameters()], "lr": 2.0}, {"params": m.backbone.body.parameters()}]
        for m in (ccc.model_a, ccc.model_b)
    ]
    a, b = (torch.optim.AdamW([*g, {"params": m.objective.parameters()}], lr=0.5) for g, m in zip(
        groups, (ccc.model_a, ccc.model_b), strict=True))  # fmt: skip
    schedule = torch.optim.lr_scheduler.StepLR(a, step_size=1, gamma=0.5)
    ccc.step(batch(), a, b)
    schedule.step()
    want = expected_correction(ccc, 0, batch(16), lambda name: 1.0 if "head" in name else 0.25)
    uniform = expected_correction(ccc, 0, batch(16), lambda name: 0.25)
    found = ccc.step(batch(16), a, b).correction_a
    assert relative(found, want) < 1e-10 and relative(found, uniform) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_finite_difference_is_close(dtype: torch.dtype) -> None:
    ccc = coupled.coupled(dtype, meta="finite_difference", dropout=0.4)
    exact = copy.deepcopy(ccc)
    exact.corrector.meta = "exact"
    exact.on_train_start(crowdnal.CrowdDataset(coupled.images(dtype), coupled.annotations()))
    state = torch.get_rng_state()
    want = exact.step(batch(dtype=dtype), *optimizers(exact)).correction_a
    torch.set_rng_state(state)
    found = ccc.step(batch(dtype=dtype), *optimizers(ccc)).correction_a
    assert 0 < relative(found, want) < (1e-5 if dtype == torch.float64 else 2e-2)


class NoForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Doubled(coupled.ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        return NoForwardMode.apply(self.head(self.body(x)))


def doubled(meta: str) -> Any:
    models = [crowdnal.attach(Doubled(seed), crowdnal.CrowdLayer(C, R)).double() for seed in range(2)]
    ccc = crowdnal.CCC(*models, num_groups=G, warmup_epochs=0, meta_size=12, meta=meta)
    ccc.on_train_start(crowdnal.CrowdDataset(coupled.images(), coupled.annotations()))
    ccc.on_epoch_start(0)
    return ccc.train()


def test_fallback_is_said_once_and_exact_refuses() -> None:
    ccc = doubled("exact")
    before = copy.deepcopy(ccc.state_dict())
    with pytest.raises(NotImplementedError, match="meta='finite_difference'"):
        ccc.step(batch(), *optimizers(ccc))
    assert all(torch.equal(before[n], p) for n, p in ccc.named_parameters())
    ccc, other = doubled("auto"), doubled("finite_difference")
    with pytest.warns(UserWarning, match="no forward-mode derivative") as said:
        first = ccc.step(batch(), *optimizers(ccc))
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ccc.step(batch(16), *optimizers(ccc))
    assert torch.equal(first.correction_a, other.step(batch(), *optimizers(other)).correction_a)


@pytest.mark.parametrize("scope", ["all", "head"])
@pytest.mark.parametrize("meta", ["exact", "finite_difference"])
def test_with_corrections_of_zero_it_is_crowd_layer_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch, scope: str, meta: str
) -> None:
    # every pass runs; momentum, running statistics and the random state must be those of plain training
    monkeypatch.setattr(steps, "correction", lambda gradient, confusion, rate: torch.zeros_like(gradient))
    ccc = coupled.coupled(scope=scope, meta=meta, dropout=0.4)
    a, b = optimizers(ccc, momentum=0.9, weight_decay=1e-3)
    plain = [copy.deepcopy(model) for model in (ccc.model_a, ccc.model_b)]
    others = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3) for m in plain]
    torch.manual_seed(5)
    for first in (0, 16, 32):
        ccc.step(batch(first), a, b)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    for first in (0, 16, 32):
        for model, optimizer in zip(plain, others, strict=True):
            optimizer.zero_grad()
            model(*batch(first)).loss.backward()
            optimizer.step()
    assert torch.equal(state, torch.get_rng_state())
    for mine, theirs in zip((ccc.model_a, ccc.model_b), plain, strict=True):
        for (name, x), y in zip(mine.state_dict().items(), theirs.state_dict().values(), strict=True):
            assert torch.equal(x, y), name
    assert ccc.model_a.backbone.body[1].num_batches_tracked == 3


def test_no_rate_is_crowd_layer_without_data() -> None:
    ccc = coupled.coupled(correction_rate=0.0, start=False)
    plain = copy.deepcopy(ccc.model_a)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    pair = optimizers(ccc, torch.optim.Adam, lr=0.01)
    for epoch in range(2):
        ccc.on_epoch_start(epoch)
        out = ccc.step(batch(), *pair)
        optimizer.zero_grad()
        loss = plain(*batch()).loss
        loss.backward()
        optimizer.step()
        assert out.correction_a is None and torch.equal(out.loss_a, loss)
    assert all(torch.equal(x, y) for x, y in zip(ccc.model_a.parameters(), plain.parameters(), strict=True))


def test_nothing_moves_no_correction() -> None:
    ccc = coupled.coupled()
    out = ccc.step(batch(), *optimizers(ccc, lr=0.0))
    assert torch.equal(out.correction_a, torch.zeros(G, C, C, dtype=torch.float64)) and out.loss_a.isfinite()
    x, y = batch()
    out = ccc.step((x, y.select(torch.zeros(y.num_annotations, dtype=torch.bool))), *optimizers(ccc))
    assert out.loss_a == 0 and not out.correction_a.any()


def test_mixed_precision() -> None:
    found: dict[str, Any] = {}
    for meta in ("exact", "finite_difference"):
        for mixed in (False, True):
            ccc = coupled.coupled(torch.float32, meta=meta)
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                out = ccc.step(batch(dtype=torch.float32), *optimizers(ccc))
                assert out.correction_a.dtype == torch.float32 and out.loss_a.dtype == torch.float32
            found[meta, mixed] = out.correction_a.flatten()
        assert torch.cosine_similarity(found[meta, False], found[meta, True], dim=0) > 0.95
    assert not torch.equal(found["exact", False], found["exact", True])


def test_autocast_around_the_loop_is_autocast_around_each_step() -> None:
    finals = []
    for around in (True, False):
        ccc = coupled.coupled(torch.float32, scope="head")
        pair = optimizers(ccc)
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            for epoch in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    ccc.on_epoch_start(epoch)
                for first in (0, 16):
                    with torch.autocast("cpu", torch.bfloat16):
                        ccc.step(batch(first, dtype=torch.float32), *pair)
        finals.append([p.detach().clone() for p in ccc.parameters()])
    assert all(torch.equal(x, y) for x, y in zip(*finals, strict=True))


@pytest.mark.parametrize("scope", ["all", "head"])
def test_grad_scaler(scope: str) -> None:
    with_scaler, without = (coupled.coupled(torch.float32, scope=scope) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    given = batch(dtype=torch.float32)
    one = with_scaler.step(given, *optimizers(with_scaler), scaler)
    two = without.step(given, *optimizers(without))
    assert_close(one.correction_a, two.correction_a, rtol=1e-3, atol=1e-5)
    for x, y in zip(with_scaler.parameters(), without.parameters(), strict=True):
        assert_close(x, y, rtol=1e-3, atol=1e-5)
    before = [p.detach().clone() for p in with_scaler.parameters()]
    with_scaler.step((given[0] * float("inf"), given[1]), *optimizers(with_scaler), scaler)
    assert all(torch.equal(x, y) for x, y in zip(before, with_scaler.parameters(), strict=True))
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_efficientnet"])
def test_timm_models_have_a_forward_mode(name: str) -> None:
    x = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    annotations = coupled.annotations()[torch.arange(12)]
    options = {"img_size": 32} if name == "test_vit" else {}
    for scope in ("all", "head"):
        models = []
        for seed in range(2):
            torch.manual_seed(seed)
            network = timm.create_model(name, num_classes=C, **options)
            models.append(crowdnal.attach(network, crowdnal.CrowdLayer(C, R)))
        ccc = crowdnal.CCC(*models, num_groups=2, warmup_epochs=0, meta_size=6, meta="exact", scope=scope)
        ccc.on_train_start(crowdnal.CrowdDataset(x, annotations))
        ccc.on_epoch_start(0)
        out = ccc.train().step((x, annotations), *optimizers(ccc))
        assert out.correction_a.abs().max() == pytest.approx(0.5)  # max(W) is still 1


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scope", ["all", "head"])
@pytest.mark.parametrize("meta", ["exact", "finite_difference"])
def test_a_step_waits_for_no_device(scope: str, meta: str) -> None:
    ccc = coupled.coupled(scope=scope, meta=meta)
    pair = optimizers(ccc, foreach=False)
    x, y = batch()
    y.prepare()
    with Operations() as operations:
        ccc.step((x, y), *pair)
    assert "convolution" in operations.seen or "mkldnn_convolution" in operations.seen
    assert not operations.seen & {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "unique_dim", "masked_select"}


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, C), nn.Parameter(torch.ones(C))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def test_head_that_is_not_last_is_refused() -> None:
    models = [crowdnal.attach(Tail(), crowdnal.CrowdLayer(C, R)) for _ in range(2)]
    ccc = crowdnal.CCC(*models, num_groups=2, warmup_epochs=0, meta_size=6, scope="head")
    x = torch.randn(60, 4)
    ccc.on_train_start(crowdnal.CrowdDataset(x, coupled.annotations()))
    ccc.on_epoch_start(0)
    with pytest.raises(ValueError, match="use scope='all'"):
        ccc.step((x, coupled.annotations()), *optimizers(ccc))


@pytest.mark.parametrize("scope", ["all", "head"])
def test_optimizer_of_another_model_is_refused(scope: str) -> None:
    ccc = coupled.coupled(scope=scope)
    a, b = optimizers(ccc)
    with pytest.raises(ValueError, match="ccc.model_a.parameters"):
        ccc.step(batch(), b, a)
