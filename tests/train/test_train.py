"""``crowdnal.train``: from files to a timm model, interrupted or not."""

from __future__ import annotations

import csv
import dataclasses
import json

import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from support.compare import assert_close
from support.small_run import (
    CLASSES,
    UNSEEN,
    WORKERS,
    N,
    T,
    config,
    frozen,
    go,
    images_of,
    read,
    same_weights,
    table,
    write,
)

from crowdnal.objectives import CrowdLayer
from crowdnal.train import InputError, Interrupted, features, loop


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
        assert_close(
            probs.max(1).values,
            torch.tensor(labels.model_probability.astype(float).to_numpy(), dtype=probs.dtype),
            atol=1e-4,
        )
    described = json.loads((out / "config.json").read_text())
    assert described["label_names"] == list(CLASSES)
    # the preprocessing that was used comes back from the folder alone
    assert timm.data.resolve_data_config({}, model=models[0])["input_size"] == (3, 32, 32)
    selected = timm.create_model(f"local-dir:{out / 'model_selected'}", pretrained=True)
    assert selected.num_classes == 3
    objective = CrowdLayer(3, len(WORKERS))
    objective.load_state_dict(safetensors.torch.load_file(out / "objective.safetensors"))
    assert_close(objective.confusion().double(), frozen_run.estimates.confusion)


@pytest.mark.slow
def test_selected_weights_are_those_of_the_selected_epoch(root, tmp_path):
    run = go(frozen(root, tmp_path / "a", epochs=4, holdout=0.2))
    epoch = run.metrics["selected_epoch"]
    again = go(frozen(root, tmp_path / "b", epochs=epoch, holdout=0.2))
    chosen = safetensors.torch.load_file(tmp_path / "a" / "model_selected" / "model.safetensors")
    last = safetensors.torch.load_file(again.out / "model.safetensors")
    assert all(torch.equal(chosen[name], last[name]) for name in last)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["majority-vote", "trace"])
def test_other_objectives(root, tmp_path, name):
    options = ("trace_weight=0.02", "normalization=softmax") if name == "trace" else ()
    run = go(frozen(root, tmp_path / "run", objective=name, options=options))
    own = name == "trace"
    assert run.estimates.from_model is own
    assert ("does not model annotators" in (run.out / "report.html").read_text()) is not own
    if own:
        assert run.objective.trace_weight == 0.02 and run.objective.annotators.normalization == "softmax"


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_changed_files_are_not_resumed(root, tmp_path, monkeypatch):
    copy = table(tmp_path / "annotations.csv", ("task", "worker", "label"), [("i00", "a", "red"), ("i01", "a", "blue")])
    untested = {"truth": None, "test_images": None, "test_labels": None}
    settings = frozen(root, tmp_path / "run", annotations=copy, epochs=1, **untested)
    go(settings)
    table(copy, ("task", "worker", "label"), [("i00", "a", "red"), ("i01", "b", "blue")])
    with pytest.raises(InputError, match="changed since"):
        go(settings, resume=True)


@pytest.mark.slow
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
        assert_close(head(features.pre_logits(model, images)), model(images))
    own = {id(p) for p in model.get_classifier().parameters()}
    assert {id(p) for p in head.parameters()} == own  # trained in place


def test_two_headed_model_is_refused():
    model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=4, img_size=32)
    with pytest.raises(InputError, match="not one classifier on pre-logits features"):
        features.frozen_head(model, 0.0, "deit", (3, 32, 32))


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_answer_that_is_no_class_is_learnt_and_never_predicted(root, tmp_path):
    text = (root / "annotations.csv").read_text()
    path = tmp_path / "answers.csv"
    path.write_text(text.replace(",red", ",no idea", 4) + "i01,ann,red\n")
    done = go(frozen(root, tmp_path / "run", annotations=path, unsure=("no idea",), epochs=10))
    assert done.data.labels == (*CLASSES, "no idea") and done.data.classes == CLASSES
    assert done.estimates.confusion.shape[1:] == (3, 4) and done.metrics["test_accuracy"] > 0.6
    rows = list(csv.DictReader((tmp_path / "run" / "labels.csv").open()))
    assert {row["label"] for row in rows} <= set(CLASSES)
    assert {row["majority_vote"] for row in rows} <= {*CLASSES, ""}
    with pytest.raises(InputError, match="num_labels"):
        go(frozen(root, tmp_path / "other", annotations=path, unsure=("no idea",), objective="doctor-net"))
