"""CCC around its steps: meta sets, groups, hooks, checkpoints, predictions, errors."""

from __future__ import annotations

import copy
import io
import sys
from typing import Any

import pytest
import torch
from support import coupled
from support.compare import assert_close
from support.coupled import C, G, N, R, optimizers
from torch import Tensor, nn

import crowdnal
from crowdnal import Annotations, CrowdDataset, simulation
from crowdnal.aggregation.clustering import cluster_matrices
from crowdnal.ccc.distillation import distill
from crowdnal.ccc.step import confusion_of

# Meta sets


def by_hand(logits: Tensor, annotations: Annotations, meta_size: int) -> tuple[list[int], list[int]]:
    rows, labels = [], []
    for c in range(logits.shape[1]):
        given = [
            i for i in range(len(annotations)) if c in annotations[i].label.tolist()
        ]  # fmt: skip
        loss = {i: float(-logits[i].double().log_softmax(0)[c]) for i in given}
        chosen = sorted(given, key=lambda i: (loss[i], i))[: meta_size // logits.shape[1]]
        rows, labels = rows + chosen, labels + [c] * len(chosen)
    return rows, labels


@pytest.mark.parametrize("meta_size", [3, 10, 10_000])
def test_distillation_by_hand(meta_size: int) -> None:
    logits = torch.randn(N, C, generator=torch.Generator().manual_seed(0)).round()  # ties
    annotations = coupled.annotations()
    rows, labels = distill(logits, annotations, meta_size)
    assert (rows.tolist(), labels.tolist()) == by_hand(logits, annotations, meta_size)


def test_a_label_without_weight_is_none_and_a_class_may_be_unused() -> None:
    found = Annotations([0, 1, 2, 3], [0, 0, 0], [0, 0, 1], num_annotators=1, num_classes=3, weight=[0.0, 1.0, 2.0])
    rows, labels = distill(torch.tensor([[9.0, 0, 0], [0, 0, 0], [0, 0, 0]]), found, 30)
    assert rows.tolist() == [1, 2] and labels.tolist() == [0, 1]
    with pytest.raises(ValueError, match="no meta set"):
        distill(torch.zeros(3, 3), found.select([False] * 3), 30)


def test_each_model_is_given_what_the_other_finds_in_evaluation_mode() -> None:
    ccc = coupled.coupled(start=False, dropout=0.5)
    ccc.model_a.backbone.body[1].eval()
    ccc.on_train_start(CrowdDataset(coupled.images(), coupled.annotations()), batch_size=7)
    modes, state = [m.training for m in ccc.modules()], torch.get_rng_state()
    buffers = [b.clone() for b in ccc.buffers()]
    ccc.on_epoch_start(0)
    assert modes == [m.training for m in ccc.modules()] and torch.equal(state, torch.get_rng_state())
    others = [b for n, b in ccc.named_buffers() if n != "groups"]
    assert all(torch.equal(x, y) for x, y in zip(buffers[1:], others, strict=True))
    for k, other in enumerate((ccc.model_b, ccc.model_a)):
        logits = copy.deepcopy(other).eval()(coupled.images()).detach()
        rows, labels = ccc.meta_sets.sets[k]
        assert (rows.tolist(), labels.tolist()) == by_hand(logits, coupled.annotations(), 12)
        assert labels.bincount().tolist() == [4, 4, 4]


class Pairs(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return coupled.images()[i], 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_of_any_data_set(num_workers: int) -> None:
    drawn = []
    for images in (coupled.images(), Pairs()):
        ccc = coupled.coupled(start=False)
        ccc.on_train_start(CrowdDataset(images, coupled.annotations()), num_workers=num_workers)
        state = torch.get_rng_state()
        ccc.on_epoch_start(0)
        drawn.append([ccc.meta_sets.batch(0, 1, 0, torch.device("cpu")) for _ in range(4)])
        assert torch.equal(state, torch.get_rng_state())
        ccc.meta_sets.restart()  # ends the workers
    for (x, y), (other_x, other_y) in zip(*drawn, strict=True):
        assert torch.equal(x, other_x) and torch.equal(y, other_y) and len(x) == 5


def test_meta_batches_go_through_the_whole_set_in_turn() -> None:
    ccc = coupled.coupled(meta_batch_size=5)
    rows, labels = ccc.meta_sets.sets[0]
    pairs = sorted(zip(coupled.images()[rows].flatten(1)[:, 0].tolist(), labels.tolist(), strict=True))
    seen = []
    for _ in range(12):  # 60 draws are five times the set of 12
        x, y = ccc.meta_sets.batch(0, 3, 0, torch.device("cpu"))
        seen += list(zip(x.flatten(1)[:, 0].tolist(), y.tolist(), strict=True))
    blocks = [seen[i : i + 12] for i in range(0, 60, 12)]
    assert all(sorted(block) == pairs for block in blocks) and blocks[0] != blocks[1]


# Groups


def test_planted_groups_are_found() -> None:
    kinds = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))
    who = torch.tensor([2, 0, 1, 1, 0, 2, 2, 0])
    weight = kinds[who] + 0.01 * torch.randn(8, 4, 4, generator=torch.Generator().manual_seed(1))
    groups = cluster_matrices(weight, 3, seed=0)
    assert groups.tolist() == [0, 1, 2, 2, 1, 0, 0, 1] and torch.equal(groups, cluster_matrices(weight, 3, seed=0))


@pytest.mark.parametrize("num_groups", [1, 2, 5, 100])
def test_fewer_matrices_than_groups(num_groups: int) -> None:
    weight = torch.eye(3).repeat(6, 1, 1)
    assert cluster_matrices(weight, num_groups, seed=0).tolist() == [0] * 6
    weight[1::2] += 1
    assert cluster_matrices(weight, num_groups, seed=0).tolist() == ([0] * 6 if num_groups == 1 else [0, 1] * 3)


def test_matrices_that_are_not_finite() -> None:
    weight = torch.eye(3).repeat(6, 1, 1)
    weight[4, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="annotator 4 is not finite"):
        cluster_matrices(weight, 2, seed=0)


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(ImportError, match=r"crowdnal\[train\]"):
        cluster_matrices(torch.randn(5, 2, 2), 2, seed=0)


# The run


def train(ccc: Any, pair: tuple[Any, Any], epochs: range, first: int = 0) -> None:
    for epoch in epochs:
        if epoch != epochs[0] or first == 0:
            ccc.on_epoch_start(epoch)
        for start in range(first if epoch == epochs[0] else 0, 48, 16):
            rows = torch.arange(start, start + 16)
            ccc.step((coupled.images()[rows], coupled.annotations()[rows]), *pair)


@pytest.mark.parametrize("stop", [(2, 0), (1, 32), (0, 0)])
def test_resumed_is_uninterrupted(stop: tuple[int, int]) -> None:
    epoch, first = stop
    options: dict[str, Any] = {"warmup_epochs": 1, "start": False}
    data = CrowdDataset(coupled.images(), coupled.annotations())
    whole = coupled.coupled(**options)
    whole.on_train_start(data)
    pair = optimizers(whole, torch.optim.Adam, lr=0.01)
    train(whole, pair, range(4))

    part = coupled.coupled(**options)
    part.on_train_start(data)
    pair = optimizers(part, torch.optim.Adam, lr=0.01)
    train(part, pair, range(epoch))
    if first:
        part.on_epoch_start(epoch)
        for start in range(0, first, 16):
            rows = torch.arange(start, start + 16)
            part.step((coupled.images()[rows], coupled.annotations()[rows]), *pair)
    file = io.BytesIO()
    torch.save({"ccc": part.state_dict(), "optimizers": [o.state_dict() for o in pair]}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed = coupled.coupled(**options)
    resumed.on_train_start(data)
    resumed.load_state_dict(state["ccc"])
    pair = optimizers(resumed, torch.optim.Adam, lr=0.01)
    for optimizer, saved in zip(pair, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    assert (resumed.epoch, resumed.corrects) == (part.epoch, part.corrects)
    train(resumed, pair, range(epoch, 4), first)
    for (name, x), y in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(x, y), name
    assert torch.equal(whole.groups, resumed.groups)


def test_warmup_is_without_corrections_or_data() -> None:
    ccc = coupled.coupled(warmup_epochs=1, start=False)
    ccc.on_epoch_start(0)
    out = ccc.step((coupled.images()[:8], coupled.annotations()[:8]), *optimizers(ccc))
    assert out.correction_a is None and out.correction_b is None and not ccc.groups.any()
    with pytest.raises(ValueError, match=r"call on_train_start\(dataset\) first"):
        ccc.on_epoch_start(1)


def test_prediction_is_the_sum_of_both() -> None:
    ccc = coupled.coupled().eval()
    x = coupled.images()
    p = (ccc.model_a(x).softmax(-1) + ccc.model_b(x).softmax(-1)) / 2
    assert_close(ccc.predict(x), p)
    assert_close(ccc(x).exp(), p)
    far = [nn.Sequential(nn.Linear(1, C)) for _ in range(2)]
    for sign, layer in zip((1, -1), far, strict=True):
        nn.init.zeros_(layer[0].weight)
        layer[0].bias.data = sign * torch.tensor([200.0, 0, -200])
    both = crowdnal.CCC(*(crowdnal.attach(f, crowdnal.CrowdLayer(C, R)) for f in far), num_groups=1)
    assert both(torch.zeros(1, 1)).isfinite().all()
    halves = ccc.model_a.objective.confusion() / 2 + ccc.model_b.objective.confusion() / 2
    assert_close(ccc.confusion(), halves)


def test_a_copy_and_a_move_start_without_the_run() -> None:
    ccc = coupled.coupled()
    ccc.step((coupled.images()[:8], coupled.annotations()[:8]), *optimizers(ccc))
    other = copy.deepcopy(ccc)
    assert other.meta_sets.items is None and torch.equal(other.groups, ccc.groups)
    assert other.meta_sets.sets[0][0].equal(ccc.meta_sets.sets[0][0])
    with pytest.raises(ValueError, match="there is no meta set yet"):
        other.step((coupled.images()[:8], coupled.annotations()[:8]), *optimizers(other))


def test_corrections_help_where_annotations_are_sparse() -> None:
    generator = torch.Generator().manual_seed(3)
    truth = torch.arange(1400) % 4
    x = torch.randn(1400, 6, generator=generator) + 3 * torch.eye(4, 6)[truth]
    kinds = torch.cat([simulation.symmetric_confusions(30, 4, 0.75), simulation.pair_flip_confusions(30, 4, 0.4)])
    annotations = simulation.simulate(truth[:400], kinds, annotations_per_item=1, seed=3)
    accuracy, correlation = {}, {}
    for rate in (0.0, 0.5):
        models = []
        for seed in range(2):
            torch.manual_seed(seed)
            network = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))
            models.append(crowdnal.attach(network, crowdnal.CrowdLayer(4, 60)))
        ccc = crowdnal.CCC(*models, num_groups=4, correction_rate=rate, warmup_epochs=8, meta_size=80)
        ccc.on_train_start(CrowdDataset(x[:400], annotations))
        pair = optimizers(ccc, torch.optim.Adam, lr=0.03)
        shuffled = torch.Generator().manual_seed(0)
        for epoch in range(40):
            ccc.on_epoch_start(epoch)
            for rows in torch.randperm(400, generator=shuffled).split(100):
                ccc.step((x[rows], annotations[rows]), *pair)
        accuracy[rate] = crowdnal.metrics.accuracy(ccc(x[400:]).detach(), truth[400:])
        correlation[rate] = crowdnal.metrics.reliability_correlation(kinds, ccc.confusion())
    assert accuracy[0.5] > accuracy[0.0] + 0.01
    assert accuracy[0.5] > crowdnal.metrics.accuracy(annotations.votes(), truth[:400]) + 0.3
    assert correlation[0.5] > 0.5


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_groups": 0}, "num_groups=0"),
        ({"num_groups": True}, "num_groups=True"),
        ({"meta_size": 2}, "meta_size=2 must be an integer, 3 or more"),
        ({"meta_batch_size": 0}, "meta_batch_size=0"),
        ({"warmup_epochs": -1}, "warmup_epochs=-1"),
        ({"correction_rate": -0.1}, "correction_rate=-0.1"),
        ({"correction_rate": float("nan")}, "correction_rate=nan"),
        ({"scope": "last"}, "scope='last' is unknown: use one of all, head"),
        ({"meta": "unrolled"}, "meta='unrolled' is unknown"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        coupled.coupled(start=False, **options)


def test_models_that_are_refused() -> None:
    good = coupled.network(0)
    bad: list[tuple[Any, type[Exception], str]] = [
        (coupled.ConvNet(1), TypeError, "model_b is ConvNet"),
        (crowdnal.attach(coupled.ConvNet(1), crowdnal.TraceRegularized(C, R)), ValueError, "TraceRegularized"),
        (crowdnal.attach(coupled.ConvNet(1), crowdnal.CrowdLayer(C, R, variant="VW")), ValueError, "variant='MW'"),
        (crowdnal.attach(coupled.ConvNet(1), crowdnal.CrowdLayer(C, R, rank=1)), ValueError, "full matrix"),
        (crowdnal.attach(coupled.ConvNet(1), crowdnal.CrowdLayer(C, R, focal=2.0)), ValueError, "focal terms"),
        (crowdnal.attach(coupled.ConvNet(1), crowdnal.CrowdLayer(C, R, groups=[0] * R)), ValueError, "groups"),
        (crowdnal.attach(coupled.ConvNet(1), crowdnal.CrowdLayer(C, R, sparse_grad=True)), ValueError, "dense grad"),
        (crowdnal.attach(coupled.ConvNet(1), crowdnal.CrowdLayer(C, R, num_labels=4)), ValueError, "num_labels=4"),
        (crowdnal.attach(coupled.ConvNet(1), crowdnal.CrowdLayer(C, R, reduction="none")), ValueError, "one number"),
        (crowdnal.attach(coupled.ConvNet(1), crowdnal.CrowdLayer(C, R + 1)), ValueError, "same annotations"),
        (good, ValueError, "shares parameters"),
    ]
    for model, error, message in bad:
        with pytest.raises(error, match=message):
            crowdnal.CCC(good, model, num_groups=G)
    flat = [crowdnal.attach(nn.Sequential(nn.Conv2d(1, C, 8), nn.Flatten()), crowdnal.CrowdLayer(C, R)) for _ in "ab"]
    crowdnal.CCC(*flat, num_groups=G)
    with pytest.raises(ValueError, match="no linear layer"):
        crowdnal.CCC(*flat, num_groups=G, scope="head")


def test_data_that_is_refused() -> None:
    ccc = coupled.coupled(start=False)
    annotations = coupled.annotations()
    with pytest.raises(TypeError, match="dataset is Tensor"):
        ccc.on_train_start(coupled.images())
    wrong = Annotations.from_dense(annotations.to_dense()[:, 1:], num_classes=C)
    with pytest.raises(ValueError, match="made for 3 and 7"):
        ccc.on_train_start(CrowdDataset(coupled.images(), wrong))
    data = CrowdDataset(coupled.images(), annotations)
    with pytest.raises(ValueError, match="evaluation has 59 items"):
        ccc.on_train_start(data, evaluation=CrowdDataset(coupled.images()[1:], annotations[1:]))
    ccc.epoch = 0
    with pytest.raises(ValueError, match="there is no meta set yet"):
        ccc.step((coupled.images(), annotations), *optimizers(ccc))


def test_first_groups_are_those_of_the_matrices() -> None:
    ccc = coupled.coupled()
    assert torch.equal(ccc.groups[1], cluster_matrices(confusion_of(ccc.model_b), G, ccc._seed_of(1)))
