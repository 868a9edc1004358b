"""The papers' tables: their rows, and that an epoch is chosen by what the row says."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import crowdnal

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
KEYS = {"table", "method", "setting", "metric", "paper", "mean", "std", "seeds"}
GENRES = [f"genre{c}" for c in range(10)]


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("_tables.training")
    for name in [name for name in sys.modules if name.split(".")[0] == "_tables"]:
        sys.modules.pop(name)


def music_like(folder: Path) -> Path:
    """Files of the shape of the music data: 60 songs that say their genre, 20 to test."""
    rng = np.random.default_rng(0)
    (folder / "music").mkdir()
    for name, size in (("gold", 60), ("test", 20)):
        genre = np.arange(size) % 10
        x = rng.normal(size=(size, 124)) + 3 * np.eye(10, 124)[genre]
        table = pandas.DataFrame(x, columns=[f"feature{i}" for i in range(124)])
        table.insert(0, "id", [f"{name}{i}" for i in range(size)])
        table["class"] = [GENRES[g] for g in genre]
        table.to_csv(folder / "music" / f"music_genre_{name}.csv", index=False)
    rows = [(f"gold{i}", f"w{w}", GENRES[i % 10]) for i in range(60) for w in rng.permutation(8)[:4]]
    pandas.DataFrame(rows, columns=["task", "worker", "label"]).to_csv(folder / "music/annotations.csv", index=False)
    return folder


@pytest.mark.slow
def test_music_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    script = [sys.executable, str(BENCHMARKS / "reproduce.py"), "music", "--data", str(music_like(tmp_path))]
    done = subprocess.run([*script, "--quick", "--seeds", "1", "--json", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    assert all(set(row) == KEYS and row["seeds"] == 1 and 0 <= row["mean"] <= 1 for row in rows)
    methods = {row["method"] for row in rows}
    assert {"clean labels", "majority-vote", "conal", "conal, authors' options", "union-net B", "max-mig"} <= methods
    metrics = {row["metric"] for row in rows if row["method"] == "conal"}
    assert metrics == {"accuracy_last", "accuracy_likelihood_selected", "accuracy_clean_selected"}
    assert {row["metric"] for row in rows if row["method"] == "clean labels"} == {
        "accuracy_last", "accuracy_clean_selected"
    }  # fmt: skip
    assert len({(row["method"], row["metric"]) for row in rows}) == len(rows)


def test_aggregation_rows(tmp_path: Path, training: ModuleType) -> None:
    """Labels 1 and 2, as temporal has them; an item whose class is not known."""
    rng = np.random.default_rng(0)
    truth = rng.integers(1, 3, 40)
    rows = [(i, f"w{w}", y if w < 5 or rng.random() < 0.6 else 3 - y) for i, y in enumerate(truth) for w in range(7)]
    (tmp_path / "aggregation").mkdir()
    table = pandas.DataFrame(rows, columns=["task", "worker", "label"])
    table.to_csv(tmp_path / "aggregation" / "bluebirds_annotations.csv", index=False)
    known = pandas.DataFrame({"task": range(39), "label": truth[:39]})
    known.to_csv(tmp_path / "aggregation" / "bluebirds_truth.csv", index=False)
    written = importlib.import_module("_tables.aggregation").run(tmp_path, 1, quick=True)
    assert all(set(row) == KEYS and row["seeds"] == 1 and row["setting"].startswith("bluebirds") for row in written)
    accuracies = {row["method"]: row["mean"] for row in written if row["metric"] == "accuracy"}
    assert {"majority-vote", "dawid-skene", "one-coin", "worker-clustering 3", "mmce"} <= set(accuracies)
    assert all(value == 1.0 for value in accuracies.values())
    assert all(row["mean"] < 1e-6 for row in written if row["metric"] == "largest_difference")


def test_every_objective_of_the_package_is_in_the_tables_or_in_one_of_its_own(training: ModuleType) -> None:
    methods = importlib.import_module("_tables.methods")
    listed = {objective for _, objective, _ in methods.METHODS}
    elsewhere = {"dl-aggregate", "lia"}
    assert listed - {training.CLEAN} == set(crowdnal.objectives.OBJECTIVES) - elsewhere
    assert len({label for label, _, _ in methods.METHODS}) == len(methods.METHODS)


def test_named_methods_only(training: ModuleType) -> None:
    wanted = importlib.import_module("_tables.methods").wanted
    more = [("own", "conal", {"rank": 3})]
    assert wanted(["own", "conal"], more) == [("conal", "conal", {"confusion_prior": None}), *more]
    assert wanted(None, more) == importlib.import_module("_tables.methods").METHODS + more
    with pytest.raises(SystemExit, match=r"unknown methods \['cona'\]"):
        wanted(["conal", "cona"])


@pytest.mark.slow
def test_cmm_rows_and_picture(tmp_path: Path, training: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cmm = importlib.import_module("_tables.cmm")
    monkeypatch.setattr(cmm, "levels", lambda: torch.stack([torch.eye(3), torch.full((3, 3), 1 / 3), torch.eye(3)]))
    rows = cmm.setup_1((100, 10000), 1, 1) + cmm.cost((100, 10000), 3)
    folder = tmp_path / "labelme"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for split, size in (("train", 40), ("test", 20)):
        np.save(folder / f"vgg16_avg_{split}.npy", rng.normal(size=(size, 512)).astype(np.float32))
        np.savetxt(folder / f"labels_{split}.txt", np.arange(size) % 8, fmt="%d")
    np.savetxt(folder / "answers.txt", rng.integers(-1, 8, (40, 6)), fmt="%d")
    rows += cmm.labelme(tmp_path, 1, 2, 1)
    assert all(set(row) == KEYS for row in rows)
    assert len({(row["table"], row["method"], row["setting"], row["metric"]) for row in rows}) == len(rows)
    found = {(r["method"], r["setting"].split(",")[0], r["metric"]): r for r in rows}
    assert found["cmm", "T=10000", "accuracy_last"]["paper"] == 0.9046
    assert found["cmm", "T=100", "parameters"]["mean"] == found["cmm", "T=10000", "parameters"]["mean"] == 30
    assert found["dl-em", "T=10000", "parameters"]["mean"] == 90000
    assert {m for _, s, m in found if s == "individual"} == {"accuracy_last", "I-JS", "G-JS"}
    assert {m for _, s, m in found if s == "global"} == {"accuracy_last", "G-JS"}
    cmm.plot(rows, tmp_path / "cmm.png")
    assert (tmp_path / "cmm.png").read_bytes().startswith(b"\x89PNG")


class Worsens(nn.Module):
    """Right until ``good`` training batches have passed, then always class 0."""

    def __init__(self, good: int) -> None:
        super().__init__()
        self.good, self.seen = good, 0
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.seen += self.training
        logits = 5 * x if self.seen <= self.good else 5 * torch.eye(3)[torch.zeros(len(x), dtype=torch.long)]
        return logits * self.scale, x


def test_epochs_are_chosen_by_held_out_labels_and_by_clean_ones(training: ModuleType) -> None:
    truth = torch.arange(60) % 3
    x = torch.eye(3)[truth]
    annotations = crowdnal.Annotations.from_dense(truth.unsqueeze(1).expand(-1, 4).clone(), num_classes=3)
    recipe = training.Recipe(lambda: Worsens(3), 3, epochs=5, lr=1e-6, objective_lr=1e-6)
    data = training.Data(x, annotations, truth, x, truth, x, truth)
    found = training.train(data, "crowd-layer", {}, recipe, seed=0, heldout=True)
    assert found == {
        "accuracy_last": pytest.approx(1 / 3), "accuracy_likelihood_selected": 1.0, "accuracy_clean_selected": 1.0
    }  # fmt: skip
    always = training.train(data, training.CLEAN, {}, recipe, seed=0, heldout=True)
    assert set(always) == {"accuracy_last", "accuracy_clean_selected"}
    # validation labels that are all class 0 prefer the late epochs: the test split has no say
    misled = training.Data(x, annotations, truth, x, truth, x, torch.zeros(60, dtype=torch.long))
    assert training.train(misled, "crowd-layer", {}, recipe, 0, heldout=False)["accuracy_clean_selected"] < 0.5
