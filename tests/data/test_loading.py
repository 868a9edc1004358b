from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.compare import assert_close
from support.crowds import assert_equal, crowd
from torch.utils.data import DataLoader, TensorDataset

from crowdnal.data import Annotations, CrowdDataset, collate, concat


def test_to_moves_what_is_cached_and_reads_no_value() -> None:
    a = crowd()
    assert a.plan is not None
    plain, prepared = crowd().to("meta"), a.prepare().to("meta")
    assert prepared._plan is not None
    assert plain._item is None and prepared._item is not None and prepared._order is not None
    assert {t.device.type for t in vars(prepared).values() if isinstance(t, torch.Tensor)} == {"meta"}
    assert prepared.vocabulary is a.vocabulary and prepared.num_annotators == 5
    assert a.to("cpu", non_blocking=True).item is a.item


@pytest.mark.skipif(torch.cuda.is_available(), reason="pins where there is a GPU")
def test_pin_memory_without_a_gpu() -> None:
    a = crowd()
    assert a.pin_memory() is a


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_moves_to_a_gpu_without_waiting() -> None:
    a = crowd().pin_memory()
    assert a.label.is_pinned() and a.weight is not None and a.weight.is_pinned()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        b = a.to("cuda", non_blocking=True)
        item, order, plan = b.item, b.order, b.plan
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal(b.to("cpu"), a)
    assert torch.equal(item.cpu(), a.item) and torch.equal(order.cpu(), a.order) and torch.equal(plan.cpu(), a.plan)
    assert_equal(b[[3, 1]].to("cpu"), a[[3, 1]])
    assert_close(b.votes().cpu(), a.votes())
    assert torch.equal(b.votes(), b.votes())
    dense = Annotations.from_dense(a.select(a.order == 0).to_dense().cuda(), num_classes=3)
    assert dense.device.type == "cuda"


# Processes


@pytest.mark.parametrize("weights_only", [True, False])
def test_saved_and_loaded(weights_only: bool) -> None:
    a = crowd().prepare()
    assert a.plan is not None
    file = io.BytesIO()
    torch.save({"annotations": a}, file)
    file.seek(0)
    b = torch.load(file, weights_only=weights_only)["annotations"]
    assert_equal(a, b)
    assert b.vocabulary == a.vocabulary and torch.equal(b.order, a.order) and torch.equal(b._plan, a.plan)


def test_pickles_and_copies() -> None:
    a = crowd()
    for b in (pickle.loads(pickle.dumps(a)), copy.deepcopy(a)):
        assert_equal(a, b)
        assert b.label is not a.label and b.vocabulary is a.vocabulary
    assert b"_dynamo" in pickle.dumps(a.label) and b"_dynamo" not in pickle.dumps(a)
    whole = crowd(2000)
    whole.vocabulary = None
    assert len(pickle.dumps(whole[3:5])) < len(pickle.dumps(whole)) / 10


def run(code: str) -> str:
    """What another Python prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout.strip()


@pytest.mark.slow
def test_vocabulary_survives_another_process(tmp_path: Path) -> None:
    path = tmp_path / "annotations.pkl"
    path.write_bytes(pickle.dumps(crowd()))
    code = f"import pickle; print(pickle.load(open({str(path)!r}, 'rb')).vocabulary.items[2])"
    assert run(code) == "image 2"


def test_worker_sends_no_ids(monkeypatch) -> None:
    a = crowd(5000)
    batch = a[:8].prepare()
    full = len(pickle.dumps(batch))
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", object())
    sent = pickle.dumps(batch)
    assert len(sent) < full / 5
    assert pickle.loads(sent).vocabulary is a.vocabulary
    a.vocabulary = batch.vocabulary = None
    assert pickle.loads(sent).vocabulary is None


# Loaders


class Dicts(TensorDataset):
    def __init__(self, crowd: CrowdDataset) -> None:
        self.crowd = crowd

    def __len__(self) -> int:
        return len(self.crowd)

    def __getitem__(self, index):
        image, annotations = self.crowd[index]
        return {"image": image, "meta": (index, annotations)}


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader(workers: int) -> None:
    a = crowd()
    images = torch.arange(24.0)[:, None].expand(24, 4)
    data = CrowdDataset(TensorDataset(images, torch.zeros(24)), a)
    loader = DataLoader(data, 7, collate_fn=collate, num_workers=workers, pin_memory=torch.cuda.is_available())
    batches = list(loader)
    assert [len(x) for x, _ in batches] == [len(b) for _, b in batches] == [7, 7, 7, 3]
    for x, b in batches:
        assert isinstance(b, Annotations) and b._item is not None and b._order is not None
        assert b.item_id is not None and torch.equal(b.item_id.float(), x[:, 0])
        assert b.vocabulary is a.vocabulary
    assert_equal(concat([b for _, b in batches]), a)
    nested = next(iter(DataLoader(Dicts(data), 5, collate_fn=collate, num_workers=workers)))
    assert nested["image"].shape == (5, 4) and nested["meta"][0].tolist() == list(range(5))
    assert_equal(nested["meta"][1], a[:5])


def test_crowd_dataset() -> None:
    a = crowd(3)
    with pytest.raises(ValueError, match="dataset has 2 samples and annotations 3 items"):
        CrowdDataset([1, 2], a)
    data = CrowdDataset(["p", ("q", 1), {"r": 2}], a)
    assert [x for x, _ in data] == ["p", "q", {"r": 2}] and len(data) == 3
    assert_equal(data[-1][1], a[2])


# torch.compile


@pytest.mark.slow
def test_import_is_light() -> None:
    code = """import sys
from crowdnal.data import Annotations
Annotations.from_long({"task": [0], "worker": [0], "label": [0]}).prepare().to_dense()
print([name for name in ("torch._dynamo", "pandas", "timm") if name in sys.modules])"""
    assert run(code) == "[]"


def step(scores: torch.Tensor, a: Annotations) -> torch.Tensor:
    picked = scores[a.item][a.order] * (a.num_classes + a.label[a.order, None])
    return picked.sum(0) + a.counts.max() + a.votes().sum(0)


def compiled():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    return torch.compile(step, backend=counter, fullgraph=True), counter


@pytest.mark.quick(1)
@pytest.mark.parametrize("prepare", [False, True])
@pytest.mark.parametrize("weight", [False, True])
def test_one_compilation_for_any_number_of_annotations(prepare: bool, weight: bool) -> None:
    function, counter = compiled()
    whole = crowd(24 * 9)
    if not weight:
        whole.weight = None
    sizes = set()
    for start in range(0, 24 * 8, 24):
        a = whole[start : start + 24].select(torch.rand(whole[start : start + 24].num_annotations) > start / 400)
        if start % 48 == 0:
            a = pickle.loads(pickle.dumps(a))
        if start % 72 == 0:
            a = concat(list(a))
        a = (a.prepare() if prepare else a).to("cpu")
        scores = torch.randn(24, 3)
        result = function(scores, a)
        assert (a._item is None) == (a._order is None) == (not prepare)
        assert_close(result, step(scores, a))
        sizes.add(a.num_annotations)
    assert len(sizes) > 4 and counter.frame_count == 1


def test_one_compilation_for_any_number_of_items() -> None:
    function, counter = compiled()
    whole = crowd(60)
    for size in (9, 20, 33, 60):
        scores = torch.randn(size, 3)
        torch._dynamo.maybe_mark_dynamic(scores, 0)
        assert_close(function(scores, whole[:size]), step(scores, whole[:size]))
    assert counter.frame_count == 1


def test_inductor_agrees() -> None:
    torch._dynamo.reset()
    function = torch.compile(step, fullgraph=True)
    for items in (12, 5):
        a, scores = crowd(items), torch.randn(items, 3)
        torch._dynamo.maybe_mark_dynamic(scores, 0)
        assert_close(function(scores, a), step(scores, a))
