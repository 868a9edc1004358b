"""``crowdnal train --objective ccc``: two networks that correct each other, as one method among others."""

from __future__ import annotations

import json
import math

import pytest
import safetensors.torch
import timm
import torch
from support import small_run
from support.compare import assert_close
from support.small_run import CLASSES, WORKERS, arguments, config, frozen, go, images_of, read, same_weights

import crowdnal
from crowdnal import cli
from crowdnal.ccc import CCC, joint
from crowdnal.train import InputError, Interrupted, plan
from crowdnal.train.progress import Reporter

OPTIONS = ("warmup_epochs=1", "num_groups=2", "meta_size=12", "meta_batch_size=6", "scope=head")
CORRECTED = {"objective": "ccc", "options": OPTIONS, "holdout": 0.1}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return small_run.write(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def frozen_run(root, tmp_path_factory):
    return go(frozen(root, tmp_path_factory.mktemp("frozen") / "run", epochs=8, drop_rate=0.1, **CORRECTED))


def stop(monkeypatch, steps: int) -> None:
    real, count = CCC.step, 0

    def step(self, *given):
        nonlocal count
        count += 1
        if count > steps:
            raise KeyboardInterrupt
        return real(self, *given)

    monkeypatch.setattr(CCC, "step", step)


def layer(folder) -> crowdnal.CrowdLayer:
    objective = crowdnal.CrowdLayer(3, len(WORKERS), confusion_prior=None)  # as those of CCC are
    objective.load_state_dict(safetensors.torch.load_file(folder / "objective.safetensors"))
    return objective


def test_both_networks_are_saved_and_predict_together(frozen_run, root):
    out = frozen_run.out
    folders = out, out / "second"
    transform = timm.data.create_transform(**timm.data.resolve_data_config({"img_size": 32}, model=frozen_run.model))
    images = images_of(frozen_run.data.images.files, transform)
    models = [timm.create_model(f"local-dir:{folder}", pretrained=True).eval() for folder in folders]
    with torch.inference_mode():
        each = [model(images).softmax(1) for model in models]
    assert not torch.equal(*each)
    assert_close((each[0] + each[1]).double() / 2, frozen_run.estimates.probs, atol=1e-5)
    first, *rest = ({n: v for n, v in model.state_dict().items() if "fc" not in n} for model in models)
    assert all(torch.equal(first[name], rest[0][name]) for name in first)  # one frozen backbone
    confusions = [layer(folder).confusion() for folder in folders]
    assert_close(torch.stack(confusions).mean(0).double(), frozen_run.estimates.confusion)


def test_tables_and_numbers(frozen_run):
    out, found = frozen_run.out, frozen_run.metrics
    history = read(out / "history.csv")
    assert len(history) == 8 and history.train_loss.astype(float).iloc[-1] < history.train_loss.astype(float).iloc[0]
    assert found["selected_epoch"] == history.heldout_log_likelihood.astype(float).idxmax() + 1
    assert found["objective"].startswith("CCC(num_classes=3") and "num_groups=2" in found["objective"]
    assert found["confusion_source"] == "objective"
    assert set(read(out / "labels.csv").label) <= set(CLASSES) and len(read(out / "annotators.csv")) == len(WORKERS)
    selected = [out / "model_selected" / name / "model.safetensors" for name in ("", "second")]
    assert all(path.is_file() for path in selected)
    assert json.loads((out / "run.json").read_text())["arguments"]["objective"] == "ccc"


def test_heldout_likelihood_is_of_the_mean_of_both():
    generator = torch.Generator().manual_seed(0)
    models = [crowdnal.attach(torch.nn.Linear(4, 3), crowdnal.CrowdLayer(3, 5)) for _ in range(2)]
    for model in models:
        with torch.no_grad():
            model.objective.annotators.weight += torch.randn(5, 3, 3, generator=generator)
    model = joint(CCC(*models, num_groups=2)).eval()
    x, dense = torch.randn(6, 4, generator=generator), torch.randint(-1, 3, (6, 5), generator=generator)
    annotations = crowdnal.Annotations.from_dense(dense, num_classes=3)
    logits, features = model.logits_and_features(x)
    assert_close(logits.exp(), (models[0](x).softmax(1) + models[1](x).softmax(1)) / 2)
    found = model.objective.log_likelihood(logits, annotations, features)
    expected = []
    for i, r, label in zip(annotations.item, annotations.annotator, annotations.label, strict=True):
        of_label = [
            (m(x)[i].softmax(0) @ m.objective.annotators.weight[r]).softmax(0)[label].item() for m in models
        ]  # fmt: skip
        expected.append(math.log(sum(of_label) / 2))
    assert_close(found, torch.tensor(expected), atol=1e-5)
    assert not list(model.objective.parameters()) and len(list(model.parameters())) == 6


@pytest.mark.parametrize("make", [pytest.param(frozen), pytest.param(config, marks=pytest.mark.slow)])
def test_stopped_and_resumed(root, tmp_path, monkeypatch, make):
    """Within the second corrected epoch; dropout, augmentation and meta sets are as they would have been."""
    changes = {**CORRECTED, "epochs": 4, "schedule": "cosine"}
    whole = go(make(root, tmp_path / "whole", **changes))
    settings = make(root, tmp_path / "run", **changes)
    with monkeypatch.context() as patch:
        stop(patch, 13)  # 5 steps an epoch
        with pytest.raises(Interrupted, match="--resume"):
            go(settings)
    go(settings, resume=True)
    assert same_weights(settings.out, whole.out)
    for name in ("second/model", "second/objective", "model_selected/second/model"):
        path = f"{name}.safetensors"
        assert (settings.out / path).read_bytes() == (whole.out / path).read_bytes(), name


@pytest.mark.slow
def test_whole_networks_from_scratch_and_from_weights(root, tmp_path):
    """Two draws of all weights, or of the last layer alone."""
    first = go(config(root, tmp_path / "a", epochs=1, **CORRECTED))
    weights = str(first.out / "model.safetensors")
    second = go(config(root, tmp_path / "b", epochs=1, lr=1e-9, weights=weights, **{**CORRECTED, "holdout": 0.0}))
    differing = []
    for out in (first.out, second.out):
        one, other = (safetensors.torch.load_file(out / name / "model.safetensors") for name in ("", "second"))
        differing.append(
            {n for n in one if n.endswith("weight") and not torch.allclose(one[n], other[n], atol=1e-6)}
        )  # fmt: skip
    assert any("conv" in name for name in differing[0]) and differing[1] == {"fc.weight"}


def test_what_it_does_not_know(root, tmp_path, capsys):
    refused = {
        "true labels": {"gold": root / "truth.csv"},
        "num_groups=0": {"options": ("num_groups=0",)},
        "it takes num_groups": {"options": ("groups=3",)},
        "cannot model": {"unsure": ("red",), "truth": None, "test_images": None, "test_labels": None},
    }
    for words, changes in refused.items():
        with pytest.raises(InputError, match=words):
            plan(frozen(root, tmp_path / "run", **{**CORRECTED, **changes}), reporter=Reporter(quiet=True))
    assert not (tmp_path / "run").exists()
    assert cli.main([*arguments(frozen(root, tmp_path / "run", objective="ccc", epochs=10)), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "all 10 epochs are warm-up" in said and "num_groups=25" in said


def test_it_is_among_the_objectives(capsys):
    assert cli.main(["objectives"]) == 0
    assert "ccc  " in capsys.readouterr().out
    assert cli.main(["objectives", "ccc"]) == 0
    said = capsys.readouterr().out
    assert (
        "crowdnal.CCC" in said
        and "warmup_epochs=10  (an integer)" in said
        and "model_a" not in said.partition("options")[2]
    )
