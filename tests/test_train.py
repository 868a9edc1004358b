"""``crowdnal.train``: from files to a timm model, interrupted or not."""

from __future__ import annotations

import dataclasses
import importlib
import json

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from small_run import CLASSES, UNSEEN, WORKERS, N, T, config, frozen, go, images_of, read, same_weights, table, write

from crowdnal.objectives import CrowdLayer
from crowdnal.train import InputError, Interrupted, data, features, loop, tables, weights
from crowdnal.train.config import TrainConfig


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def frozen_run(root, tmp_path_factory):
    out = tmp_path_factory.mktemp("frozen") / "run"
    return go(frozen(root, out, epochs=30, holdout=0.15, augment="none"))


@pytest.fixture(scope="module")
def whole_run(root, tmp_path_factory):
    """Uninterrupted, all weights trained, with timm's augmentation and a model that has batch normalisation."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return go(config(root, out, holdout=0.1))


# Outputs


def test_files_of_a_run(frozen_run):
    out = frozen_run.out
    labels, annotators, history = (read(out / f"{name}.csv") for name in ("labels", "annotators", "history"))
    assert len(labels) == N + UNSEEN and len(history) == 30
    assert list(annotators.annotator) == ["ann", "bob", "w 3", "w 007", "w 10"]  # natural order, every id as it was
    assert annotators.num_labels.sum() == 3 * N
    silent = annotators.set_index("annotator").loc["w 007"]
    assert silent.num_labels == 0 and silent.reliability == "" and silent.spammer_score == ""
    # items keep the ids of the annotation file, images nobody annotated go by their path
    assert set(labels.item) == {f"i{i:02d}" for i in range(N)} | {f"{i % 2}/i{i:02d}.png" for i in range(N, N + 3)}
    unseen = labels[labels.num_labels == 0]
    assert len(unseen) == UNSEEN and (unseen.majority_vote == "").all()
    assert (unseen.label == unseen.model_label).all()
    assert set(labels.label) <= set(CLASSES) and labels.probability.astype(float).between(1 / 3, 1).all()
    found = json.loads((out / "metrics.json").read_text())
    assert found["num_annotations"] == 3 * N and found["num_heldout"] == round(0.15 * 3 * N)
    assert found["num_test"] == T and found["selected_epoch"] in range(1, 31)
    best = history.heldout_log_likelihood.astype(float).idxmax()
    assert found["selected_epoch"] == history.epoch[best]
    assert found["selected_test_accuracy"] == pytest.approx(history.test_accuracy[best])
    assert found["test_accuracy"] == pytest.approx(history.test_accuracy.iloc[-1])
    assert "crowdnal train" in found["command"]


def test_crowd_is_seen_through(frozen_run):
    """The colours are easy; worker "w 10" is wrong nine times in ten."""
    assert frozen_run.metrics["truth"]["label_accuracy"] > 0.9
    annotators = read(frozen_run.out / "annotators.csv").set_index("annotator")
    assert annotators.reliability.drop("w 007").astype(float).idxmin() == "w 10"


def test_model_is_a_plain_timm_model(frozen_run, root):
    out = frozen_run.out
    transform = timm.data.create_transform(**timm.data.resolve_data_config({"img_size": 32}, model=frozen_run.model))
    images = images_of(frozen_run.data.images.files, transform)
    labels = read(out / "labels.csv")
    state = safetensors.torch.load_file(out / "model.safetensors")
    models = [
        timm.create_model(f"local-dir:{out}", pretrained=True),
        timm.create_model("test_resnet", num_classes=3, checkpoint_path=str(out / "model.safetensors")),
    ]
    for model in models:
        assert model.state_dict().keys() == state.keys()
        with torch.inference_mode():
            probs = model.eval()(images).softmax(1)
        assert [CLASSES[k] for k in probs.argmax(1)] == list(labels.model_label)
        np.testing.assert_allclose(probs.max(1).values, labels.model_probability.astype(float), atol=1e-4)
    described = json.loads((out / "config.json").read_text())
    assert described["label_names"] == list(CLASSES)
    # the preprocessing that was used comes back from the folder alone
    assert timm.data.resolve_data_config({}, model=models[0])["input_size"] == (3, 32, 32)
    selected = timm.create_model(f"local-dir:{out / 'model_selected'}", pretrained=True)
    assert selected.num_classes == 3
    objective = CrowdLayer(3, len(WORKERS))
    objective.load_state_dict(safetensors.torch.load_file(out / "objective.safetensors"))
    torch.testing.assert_close(objective.confusion().double(), frozen_run.estimates.confusion)


def test_selected_weights_are_those_of_the_selected_epoch(root, tmp_path):
    run = go(frozen(root, tmp_path / "a", epochs=4, holdout=0.2))
    epoch = run.metrics["selected_epoch"]
    again = go(frozen(root, tmp_path / "b", epochs=epoch, holdout=0.2))
    chosen = safetensors.torch.load_file(tmp_path / "a" / "model_selected" / "model.safetensors")
    last = safetensors.torch.load_file(again.out / "model.safetensors")
    assert all(torch.equal(chosen[name], last[name]) for name in last)


@pytest.mark.parametrize("name", ["majority-vote", "trace"])
def test_other_objectives(root, tmp_path, name):
    options = ("trace_weight=0.02", "normalization=softmax") if name == "trace" else ()
    run = go(frozen(root, tmp_path / "run", objective=name, options=options))
    own = name == "trace"
    assert run.estimates.from_model is own
    assert ("does not model annotators" in (run.out / "report.html").read_text()) is not own
    if own:
        assert run.objective.trace_weight == 0.02 and run.objective.annotators.normalization == "softmax"


def test_amp_and_vit_at_another_size(root, tmp_path):
    go(config(root, tmp_path / "run", model="test_vit", epochs=1, amp=True, augment="light"))
    model = timm.create_model(f"local-dir:{tmp_path / 'run'}", pretrained=True)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 3)


# The same weights, however it went


def stop_after(monkeypatch, steps: int, error: BaseException) -> None:
    real, count = CrowdLayer._loss, 0

    def loss(self, *inputs):
        nonlocal count
        count += 1
        if count > steps:
            raise error
        return real(self, *inputs)

    monkeypatch.setattr(CrowdLayer, "_loss", loss)


def test_stopped_within_an_epoch(whole_run, root, tmp_path, monkeypatch):
    settings = config(root, tmp_path / "run", holdout=0.1)
    with monkeypatch.context() as patch:
        stop_after(patch, 7, RuntimeError("power cut"))  # 5 steps an epoch
        with pytest.raises(RuntimeError, match="power cut"):
            go(settings)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    # neither the number of workers nor where features would be changes what is computed
    go(dataclasses.replace(settings, workers=2), resume=True)
    assert same_weights(tmp_path / "run", whole_run.out)
    chosen = "model_selected/model.safetensors"
    assert (tmp_path / "run" / chosen).read_bytes() == (whole_run.out / chosen).read_bytes()


def test_frozen_stopped_by_the_user(root, tmp_path, monkeypatch):
    whole = go(frozen(root, tmp_path / "whole", schedule="cosine"))
    settings = frozen(root, tmp_path / "run", schedule="cosine", feature_cache=whole.out / "features")
    with monkeypatch.context() as patch:
        stop_after(patch, 8, KeyboardInterrupt())
        with pytest.raises(Interrupted, match=r"crowdnal train .*--out .*run.* --resume"):
            go(settings)
    assert loop.load_state(settings.out / "checkpoint.pt")["progress"]["epoch"] == 1
    go(settings, resume=True)
    assert same_weights(settings.out, whole.out)
    before = (settings.out / "model.safetensors").read_bytes()
    go(settings, resume=True)  # nothing left to do
    assert (settings.out / "model.safetensors").read_bytes() == before


def test_seed_changes_the_run(root, tmp_path, whole_run):
    other = go(config(root, tmp_path / "run", holdout=0.1, seed=1))
    assert not same_weights(other.out, whole_run.out)


def test_out_that_holds_a_run(root, frozen_run, tmp_path):
    out = frozen_run.out
    settings = frozen(root, out, epochs=30, holdout=0.15, augment="none")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="holds a run already: add --resume"):
        go(settings)
    for change, words in (
        ({"lr": 0.03}, r"--lr: it was 0\.02, now 0\.03"),
        ({"epochs": 31}, "--epochs: it was 30, now 31"),
        ({"model": "test_vit"}, "--model: it was test_resnet, now test_vit"),
        ({"options": ("variant=VB",)}, "--option: it was not given, now"),
        ({"truth": None}, "--truth: it was .*, now not given"),
    ):
        with pytest.raises(InputError, match=words):
            go(dataclasses.replace(settings, **change), resume=True)
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="holds no run"):
        go(frozen(root, tmp_path / "nothing"), resume=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"config\.json that would be overwritten"):
        go(frozen(root, tmp_path / "mine"))
    assert (tmp_path / "mine" / "config.json").read_text() == "{}"


def test_changed_files_are_not_resumed(root, tmp_path, monkeypatch):
    copy = table(tmp_path / "annotations.csv", ("task", "worker", "label"), [("i00", "a", "red"), ("i01", "a", "blue")])
    untested = {"truth": None, "test_images": None, "test_labels": None}
    settings = frozen(root, tmp_path / "run", annotations=copy, epochs=1, **untested)
    go(settings)
    table(copy, ("task", "worker", "label"), [("i00", "a", "red"), ("i01", "b", "blue")])
    with pytest.raises(InputError, match="changed since"):
        go(settings, resume=True)


def test_mistake_leaves_nothing_to_resume(root, tmp_path):
    settings = config(root, tmp_path / "run", lr=1e30, epochs=2)
    with pytest.raises(InputError, match=r"loss is .* in epoch 1: lower --lr"):
        go(settings)
    go(dataclasses.replace(settings, lr=1e-3, epochs=1))


# Frozen features


@pytest.mark.parametrize("name", ["test_efficientnet", "test_convnext", "test_vit", "test_byobnet", "dla34"])
def test_head_on_features_is_the_model(name):
    size = {"img_size": 32} if name == "test_vit" else {}
    model = timm.create_model(name, num_classes=4, **size).eval()
    head = features.frozen_head(model, 0.3, name, (3, 32, 32))
    images = torch.randn(5, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(head(features.pre_logits(model, images)), model(images))
    own = {id(p) for p in model.get_classifier().parameters()}
    assert {id(p) for p in head.parameters()} == own  # trained in place


def test_two_headed_model_is_refused():
    model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=4, img_size=32)
    with pytest.raises(InputError, match="not one classifier on pre-logits features"):
        features.frozen_head(model, 0.0, "deit", (3, 32, 32))


def test_features_are_cached(root, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = go(frozen(root, tmp_path / "a", feature_cache=cache, workers=2))
    files = sorted(cache.iterdir())
    assert len(files) == 2 and not (tmp_path / "a" / "features").exists()
    with monkeypatch.context() as patch:
        patch.setattr(features, "extract", lambda *_, **__: pytest.fail("computed again"))
        second = go(frozen(root, tmp_path / "b", feature_cache=cache))
    assert same_weights(first.out, second.out)
    files[0].write_bytes(b"damaged")
    third = go(frozen(root, tmp_path / "c", feature_cache=cache))
    assert same_weights(first.out, third.out) and sorted(cache.iterdir()) == files
    go(frozen(root, tmp_path / "d", feature_cache=cache, model="test_efficientnet"))
    assert len(list(cache.iterdir())) == 4


def test_cache_key_knows_the_files(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(b"1")
    key = features.cache_key([file], "m", "digest", "transform", "cpu", False)
    others = [
        features.cache_key([file], "m", "other", "transform", "cpu", False),
        features.cache_key([file], "m", "digest", "other", "cpu", False),
        features.cache_key([file], "m", "digest", "transform", "cpu", True),
    ]
    file.write_bytes(b"12")
    others.append(features.cache_key([file], "m", "digest", "transform", "cpu", False))
    assert len({key, *others}) == 5


def test_unreadable_image(root, tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (20, 20)).save(tmp_path / "images" / "a.png")
    (tmp_path / "images" / "b.png").write_bytes(b"no image")
    labels = table(tmp_path / "l.csv", ("task", "worker", "label"), [("a", "w", "x"), ("b", "w", "y")])
    settings = frozen(
        root, tmp_path / "run", images=tmp_path / "images", annotations=labels, truth=None, test_images=None,
        test_labels=None,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"b\.png cannot be read as an image"):
        go(settings)


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
    assert data.match(tasks, names, tmp_path, where) == dict(zip(tasks, [1, 0, 2, 3, 4, 5], strict=False))
    for task, words in (
        ("x", r"row 0: 'x' could be a/x\.png, b/x\.png"),
        ("b/yy.jpg", r"row 0: no image 'b/yy\.jpg' in .*near matches: b/y\.jpg"),
        ("other/y.jpg", "no image 'other/y.jpg'"),  # a path that is wrong is not a base name
    ):
        with pytest.raises(InputError, match=words):
            data.match([task], names, tmp_path, where)
    with pytest.raises(InputError, match=r"row 1: tasks 'z' and 'z\.png' are both z\.png"):
        data.match(["z", "z.png"], names, tmp_path, where)


def annotations(path, text, form="auto", items=None, missing=None):
    path.write_text(text)
    return tables.read_annotations(path, form, ("task", "worker", "label"), missing, items)


def cells(table) -> list[tuple[str, str, str]]:
    return [(t, w, y) for t, w, y in zip(table.task, table.worker, table.label, strict=True) if y is not None]


def test_dense_files(tmp_path):
    items = tmp_path / "items.txt"
    items.write_text("p.png\nq.png\n")
    expected = [("p.png", "1", "2"), ("q.png", "0", "0"), ("q.png", "2", "1")]
    for text in ("-1 2 -1\n0 -1 1\n", "-1,2,-1\n0,,1\n", "nan 2.0 -1\n0.0 nan 1.0\n", "-1\t2\t-1\n0\t-1\t1"):
        table = annotations(tmp_path / "a.txt", text, items=items)
        assert cells(table) == expected and table.workers == ["0", "1", "2"] and set(table.task) == {"p.png", "q.png"}
    header = annotations(tmp_path / "b.csv", "item,ann,bob\nx.png,cat,\ny.png,-1,dog\n", form="dense")
    assert cells(header) == [("x.png", "ann", "cat"), ("y.png", "bob", "dog")]
    index = annotations(tmp_path / "c.csv", ",0,1,2,3\nx,,9,1,\n", missing="9")  # as DataFrame.to_csv writes it
    assert cells(index) == [("x", "2", "1")]
    scale = annotations(tmp_path / "d.csv", "item,a,b,c,d\nx,-1,3,7,7\n", missing="7")  # -1 is a label here
    assert cells(scale) == [("x", "a", "-1"), ("x", "b", "3")]
    for text, words, options in (
        ("0 1\n1 0\n", "give --items FILE with one file name a line", {}),
        ("0 1\n1 0\n1 1\n", "has 2 names for 3 rows", {"items": items}),
        ("0 1\n1\n", "line 2: 1 columns where line 1 has 2", {"items": items}),
        ("i,a,a,b,c\nx,1,1,1,1\n", "line 1: column 'a' occurs twice", {}),
        ("x 1 -1 0 2\ny 1 -1 0 2\n", "line 1: column '-1' is no name of a worker: the first line must", {}),
        ("image,person,answer\nx,a,1\n", "name yours with --task-column", {}),
        ("", "is empty", {}),
    ):
        with pytest.raises(InputError, match=words):
            annotations(tmp_path / "e.csv", text, **options)


def test_long_files(tmp_path):
    text = 'worker,note,task,label\nw,"two\nlines, really",007,NA\nw,,008, 1 \nv,,008,\n'
    table = annotations(tmp_path / "a.csv", text)
    assert table.task == ["007", "008", "008"] and table.label == [None, "1", None]
    assert table.where(1).endswith("a.csv, line 4")
    assert cells(annotations(tmp_path / "b.csv", "task;worker;label\nx;1;-1\n")) == [("x", "1", "-1")]
    # what pandas writes of a column of integers with a gap
    assert cells(annotations(tmp_path / "b.csv", "task,worker,label\nx,1,2.0\ny,1,\n")) == [("x", "1", "2")]
    assert cells(annotations(tmp_path / "b.csv", "task\tworker\tlabel\nx\t1\t0\n", missing="0")) == []
    with pytest.raises(InputError, match="line 2: column 'worker' is empty"):
        annotations(tmp_path / "c.csv", "task,worker,label\nx,,1\n")
    with pytest.raises(InputError, match="no column 'label', it has task, worker, answer"):
        annotations(tmp_path / "d.csv", "task,worker,answer\nx,1,1\n", form="long")


def test_label_files(tmp_path):
    items, path = tmp_path / "items.txt", tmp_path / "labels.txt"
    items.write_text("p.png\nq.png\n")

    def labels(text, items=None):
        path.write_text(text)
        return tables.read_labels(path, items, ("task", "label"), "--test-labels")

    assert labels("3\n0.0\n", items).label == ["3", "0"]
    assert labels("tall building\nforest\n", items).label == ["tall building", "forest"]
    assert labels("id,task,label\n1,p.png,a\n2,q.png,\n").task == ["p.png"]
    assert labels("file,class\np.png,a\n").label == ["a"]
    for text, words, names in (
        ("1\n2\n", "give --test-items FILE", None),
        ("1\n2\n3\n", "has 2 names for 3 labels", items),
        ("p.png,1\nq.png,2\n", "must have a header", None),
    ):
        with pytest.raises(InputError, match=words):
            labels(text, names)


def test_classes():
    assert tables.class_names(["10", "9", None, "9"]) == ["9", "10"]
    assert tables.class_names(["b", "a10", "a9", "2", "-1"]) == ["-1", "2", "a9", "a10", "b"]
    assert tables.code_labels(["1", None, "b"], ["a", "b"], None, "f") == [1, -1, 1]  # numbers are places in names
    assert tables.code_labels(["1", "3"], ["1", "3"], None, "f") == [0, 1]
    with pytest.raises(InputError, match=r"f, line 9: label '3' is not among the 2 classes \(1, 2\)"):
        tables.code_labels(["1", "3"], ["1", "2"], [8, 9], "f")


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
    with pytest.raises(InputError, match="label 'red' is not among the 2 classes"):
        data.load(config(root, tmp_path / "run", classes=("blue", "green")))


def test_batch_of_one_joins_the_one_before():
    assert [len(batch) for batch in loop._batches(torch.arange(9), 4)] == [4, 5]
    assert [len(batch) for batch in loop._batches(torch.arange(1), 4)] == [1]
    assert [len(batch) for batch in loop._batches(torch.arange(10), 4)] == [4, 4, 2]
