"""``crowdnal train --cross-fit``: heads on frozen features, each item's scores by one that never saw its labels."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from support import small_run
from support.small_run import config, frozen, go, same_weights
from torch import Tensor

from crowdnal.train import InputError, Interrupted, Result
from crowdnal.train.loop import Trainer, load_state
from crowdnal.train.steps import OneNetwork

CROSSED = {"objective": "dl-em", "cross_fit": 3, "epochs": 4, "drop_rate": 0.5}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return small_run.write(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def crossed(root, tmp_path_factory):
    return go(frozen(root, tmp_path_factory.mktemp("cross-fit") / "run", **CROSSED))


def copies_of(out: Path) -> list[tuple[Tensor, Tensor]]:
    state = load_state(out / "checkpoint.pt")["model"]
    names = [f"backbone.copies.{k}.classifier" for k in range(3)]
    return [(state[f"{name}.weight"], state[f"{name}.bias"]) for name in names]


def test_the_model_is_the_mean_of_the_heads(crossed: Result) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model(f"local-dir:{crossed.out}", pretrained=True)
    weights, biases = zip(*copies_of(crossed.out), strict=True)
    assert torch.allclose(model.get_classifier().weight, torch.stack(weights).mean(0))
    assert torch.allclose(model.get_classifier().bias, torch.stack(biases).mean(0))
    assert not torch.allclose(weights[0], weights[1])


def test_an_image_is_told_of_by_a_head_that_never_saw_its_labels(root, tmp_path, monkeypatch) -> None:
    """Other labels of an image change what is said of others before the first round, and not what is said of it."""
    said: list[Tensor] = []
    real = Trainer.predict

    def predict(self, split, rows, *, out_of_fold=False):
        found = real(self, split, rows, out_of_fold=out_of_fold)
        said.extend([found[0].clone()] if out_of_fold else [])
        return found

    monkeypatch.setattr(Trainer, "predict", predict)
    rows = list(csv.reader((root / "annotations.csv").open(newline="")))
    image = rows[1][0]
    turned = {"blue": "green", "green": "red", "red": "blue"}
    changed = [[i, w, turned.get(label, label) if i == image else label] for i, w, label in rows[1:]]
    small_run.table(tmp_path / "other.csv", rows[0], changed)
    for name, file in (("a", root / "annotations.csv"), ("b", tmp_path / "other.csv")):
        go(frozen(root, tmp_path / name, **{**CROSSED, "epochs": 1, "annotations": file}))
    ids = [row[0] for row in csv.reader((tmp_path / "a" / "labels.csv").open(newline=""))][1:]
    (mine,) = [k for k, name in enumerate(ids) if image in name]
    assert len(said) == 2 and torch.equal(said[0][mine], said[1][mine])
    assert (said[0] != said[1]).any(1).sum() > len(ids) // 2


def test_rounds_are_made_of_out_of_fold_scores(root, crossed, tmp_path) -> None:
    plain = go(frozen(root, tmp_path / "plain", **{**CROSSED, "cross_fit": 0}))
    assert plain.objective.history[0].log_likelihood != crossed.objective.history[0].log_likelihood
    again = go(frozen(root, tmp_path / "again", **CROSSED))
    assert same_weights(crossed.out, again.out)
    other = go(frozen(root, tmp_path / "other", **CROSSED, seed=1))
    folds = [load_state(run.out / "checkpoint.pt")["model"]["backbone.fold"] for run in (crossed, other)]
    assert not torch.equal(*folds)


def test_a_resumed_run_has_the_same_bits(crossed, root, tmp_path, monkeypatch) -> None:
    out, real = tmp_path / "run", OneNetwork.on_epoch_start

    def stop(steps, epoch):
        if epoch == 2:
            raise KeyboardInterrupt
        real(steps, epoch)

    monkeypatch.setattr(OneNetwork, "on_epoch_start", stop)
    with pytest.raises(Interrupted, match="--cross-fit 3 .*--resume"):
        go(frozen(root, out, **CROSSED))
    monkeypatch.undo()
    with pytest.raises(InputError, match="--cross-fit: it was 3, now 4"):
        go(frozen(root, out, **{**CROSSED, "cross_fit": 4}), resume=True)
    go(frozen(root, out, **CROSSED), resume=True)
    assert same_weights(out, crossed.out)
    assert (out / "labels.csv").read_bytes() == (crossed.out / "labels.csv").read_bytes()


@pytest.mark.parametrize("objective", ["auto", "feature-em", "conal", "lia"])
def test_every_objective_takes_it(root, tmp_path, objective) -> None:
    run = go(frozen(root, tmp_path / "run", **{**CROSSED, "objective": objective, "epochs": 2, "holdout": 0.1}))
    assert run.metrics["arguments"]["cross_fit"] == 3 and (run.out / "model_selected").is_dir()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"freeze_backbone": False}, "--cross-fit 3 trains as many heads on the features of a frozen backbone: add"),
        ({"cross_fit": 1}, "--cross-fit 1 must be 2 to 100, or 0 for none"),
        ({"objective": "doctor-net"}, "--cross-fit is of one classifier, but doctor-net trains several"),
        ({"objective": "ccc"}, "--cross-fit is of one classifier, but ccc trains several"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_said_at_once(root, tmp_path, change, words) -> None:
    with pytest.raises(InputError, match=words):
        go(config(root, tmp_path / "run", **{"freeze_backbone": True, **CROSSED, **change}))
    assert not (tmp_path / "run").exists()
