"""What ``crowdnal train`` reads: checkpoints, annotation files, label files, images."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import safetensors.torch
import timm
import torch
from support.small_run import UNSEEN, WORKERS, N, T, config, frozen, go, read, write

from crowdnal.train import InputError, TrainConfig, data, images, loop, weights


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write(tmp_path_factory.mktemp("small"))


# Weights


@pytest.fixture
def donor():
    torch.manual_seed(3)
    model = timm.create_model("test_resnet", num_classes=7)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def load(settings: TrainConfig, file) -> dict[str, torch.Tensor]:
    model, _ = weights.create_model(dataclasses.replace(settings, weights=str(file)), 3)
    assert model.num_classes == 3
    return model.state_dict()


def renamed(state):
    return {f"layer{i}.{name.split('.')[-1]}": tensor for i, (name, tensor) in enumerate(state.items())}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: s,
        lambda s: {"state_dict": {f"module.{k}": v for k, v in s.items()}, "epoch": 3},
        lambda s: {"model": s},
        renamed,
        lambda s: {k: v for k, v in s.items() if "num_batches" not in k},
        lambda s: {k: v for k, v in renamed(s).items() if "num_batches" not in k},
    ],
    ids=["plain", "module", "model", "by order", "old torch", "by order, old torch"],
)
def test_checkpoints(root, tmp_path, donor, wrap):
    torch.save(wrap(donor), tmp_path / "w.pth")
    state = load(config(root, tmp_path / "run"), tmp_path / "w.pth")
    for name, tensor in donor.items():
        if not name.startswith("fc."):
            assert torch.equal(state[name], tensor), name


def test_safetensors_and_kept_classifier(root, tmp_path, donor):
    three = timm.create_model("test_resnet", num_classes=3).state_dict()
    safetensors.torch.save_file(three, tmp_path / "w.safetensors")
    state = load(config(root, tmp_path / "run"), tmp_path / "w.safetensors")
    assert torch.equal(state["fc.weight"], three["fc.weight"])  # as many classes: its classifier is kept


def test_weights_that_are_not_finite_are_named(root, tmp_path, donor):
    """An error about features[0] blamed nobody."""
    torch.save({k: v * float("nan") if v.is_floating_point() else v for k, v in donor.items()}, tmp_path / "w.pth")
    settings = frozen(root, tmp_path / "run", weights=str(tmp_path / "w.pth"))
    with pytest.raises(InputError, match=r"png: the model makes features of it that are not finite: .*--weights"):
        go(settings)


def test_checkpoints_that_do_not_fit(root, tmp_path, donor):
    settings = config(root, tmp_path / "run")

    def refuse(state, words):
        torch.save(state, tmp_path / "w.pth")
        with pytest.raises(InputError, match=words):
            load(settings, tmp_path / "w.pth")

    wrong = {**donor, "conv1.0.weight": torch.zeros(2, 2)}
    refuse(wrong, r"conv1\.0\.weight is \[2, 2\] in the file, \[")
    names = list(donor)
    refuse(dict(list(renamed(donor).items())[:-2]), "first difference at fc")
    # one layer's scale and mean have one shape: only the names tell them apart
    a, b = next((a, b) for a, b in zip(names, names[1:], strict=False) if a.endswith("bn1.bias"))
    swapped = [b if name == a else a if name == b else name for name in names]
    refuse(renamed({name: donor[name] for name in swapped}), "first difference at layer")
    refuse({"epoch": 3}, "holds no state_dict")
    (tmp_path / "w.pth").write_bytes(b"nothing")
    with pytest.raises(InputError, match="cannot be read as tensors only"):
        load(settings, tmp_path / "w.pth")
    (tmp_path / "w.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match="not a safetensors file"):
        load(settings, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match="there is no such file"):
        load(settings, tmp_path / "absent.pth")


def test_weights_of_an_installed_package(root, tmp_path, donor, monkeypatch):
    site = tmp_path / "site"
    info = site / "some_weights-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "some_weights").mkdir()
    torch.save(donor, site / "some_weights" / "model.pth")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-weights\nVersion: 1.0\n")
    (info / "RECORD").write_text("some_weights/__init__.py,,\nsome_weights/model.pth,,\n")
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    model, origin = weights.create_model(config(root, tmp_path / "run", weights="some-weights"), 3)
    assert torch.equal(model.state_dict()["conv1.0.weight"], donor["conv1.0.weight"]) and "some-weights" in origin
    (info / "RECORD").write_text("some_weights/__init__.py,,\n")
    with pytest.raises(InputError, match="must hold one checkpoint .* it holds none"):
        weights.find_checkpoint("some-weights")
    with pytest.raises(InputError, match="neither a file nor an installed package; near matches: some-weights"):
        weights.find_checkpoint("some-weight")


def test_download_that_fails(root, tmp_path, monkeypatch):
    def create(name, pretrained=False, **_):
        assert pretrained
        raise OSError("we could not connect\nmany more lines")

    monkeypatch.setattr(timm, "create_model", create)
    with pytest.raises(InputError, match=r"could not get weights .*we could not connect\): check the connection"):
        weights.create_model(config(root, tmp_path / "run", pretrained=True), 3)


# Files


def where(row: int) -> str:
    return f"row {row}"


def test_matching(tmp_path):
    names = ["a/x.png", "b/x.png", "b/y.jpg", "c d.png", "z.png", "z2.jpeg"]
    tasks = ["b/x.png", "a/x", "y", "c d.png", "./z.png", "z2.jpeg", "a/x"]
    assert images.match(tasks, names, tmp_path, where) == dict(zip(tasks, [1, 0, 2, 3, 4, 5], strict=False))
    for task, words in (
        ("x", r"row 0: 'x' could be a/x\.png, b/x\.png"),
        ("b/yy.jpg", r"row 0: no image 'b/yy\.jpg' in .*near matches: b/y\.jpg"),
        ("other/y.jpg", "no image 'other/y.jpg'"),  # a path that is wrong is not a base name
    ):
        with pytest.raises(InputError, match=words):
            images.match([task], names, tmp_path, where)
    with pytest.raises(InputError, match=r"row 1: tasks 'z' and 'z\.png' are both z\.png"):
        images.match(["z", "z.png"], names, tmp_path, where)


def test_loaded_data(root, tmp_path):
    loaded = data.load(config(root, tmp_path / "run", classes=("blue", "green", "red", "violet")))
    assert loaded.annotations.num_classes == 4 and loaded.annotations.num_annotators == len(WORKERS)
    assert loaded.annotations.num_items == N + UNSEEN and len(loaded.test) == T
    rows = [loaded.images.ids.index(f"i{i:02d}") for i in range(N)]
    assert loaded.images.truth[rows].tolist() == [i % 3 for i in range(N)]
    assert loaded.images.files[rows[5]].name == "i05.png"
    long = loaded.annotations.to_long()
    original = read(root / "annotations.csv")
    original = original[original.label != ""]
    assert sorted(map(tuple, long.to_numpy())) == sorted(map(tuple, original.to_numpy()))
    with pytest.raises(InputError, match=r"annotations\.csv, line \d+, column 'label'.*'red' is not in --classes"):
        data.load(config(root, tmp_path / "run", classes=("blue", "green")))


def test_batch_of_one_joins_the_one_before():
    assert [len(batch) for batch in loop._batches(torch.arange(9), 4)] == [4, 5]
    assert [len(batch) for batch in loop._batches(torch.arange(1), 4)] == [1]
    assert [len(batch) for batch in loop._batches(torch.arange(10), 4)] == [4, 4, 2]
