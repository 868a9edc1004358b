"""The table of LIA on the medical relations: its rows, and how it samples, plants and scores."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas
import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
KEYS = {"table", "method", "setting", "metric", "paper", "mean", "std", "seeds"}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("_tables.lia")
    for name in [name for name in sys.modules if name.split(".")[0] == "_tables"]:
        sys.modules.pop(name)


def medical_like(root: Path) -> Path:
    """Files of the shape of the medical relations: 40 sentences, 3 tags, 7 judgements each."""
    folder, rng = root / "medical_relations", np.random.default_rng(0)
    folder.mkdir()
    ids = 100 + rng.permutation(40)
    pandas.DataFrame({"sentence_id": ids, "sentence": "text"}).to_csv(folder / "sentences.csv", index=False)
    np.save(folder / "features_minilm.npy", rng.normal(size=(40, 6)).astype(np.float16))
    sets = ["CAUSES", "TREATS", "CAUSES|TREATS", "NONE"]
    rows = [(i, worker, sets[rng.integers(4)]) for i in ids for worker in rng.permutation(9)[:7]]
    pandas.DataFrame(rows, columns=["sentence_id", "worker", "relations"]).to_csv(folder / "judgments.csv", index=False)
    for task in ("cause", "treat"):
        expert = rng.choice([-1.0, 1.0, np.nan], 40)
        expert[:2] = -1.0, 1.0
        found = pandas.DataFrame({"sentence_id": ids, "expert": expert})
        found.sample(frac=1, random_state=0).to_csv(folder / f"truth_{task}.csv", index=False)
    return root


def test_rows(table: ModuleType, tmp_path: Path) -> None:
    rows = table.run(medical_like(tmp_path), 2, True)
    assert all(set(row) == KEYS and row["seeds"] == 2 for row in rows)
    methods = {"majority-vote", "mmce", "lia-e", "lia", "lia-ml"}
    for metric in ("accuracy", "auc"):
        found = [row for row in rows if row["metric"] == metric]
        assert {row["method"] for row in found} == methods and len(found) == 2 * len(methods)
        assert all(0 <= row["mean"] <= 1 for row in found)
    places = [row for row in rows if row["metric"] == "reliability_place"]
    assert len(places) == 4 and all(1 <= row["mean"] <= 11 for row in places)
    assert {row["paper"] for row in places} == {1, 11}
    assert len({(row["method"], row["setting"], row["metric"]) for row in rows}) == len(rows)


def test_samples_are_whole_judgements_and_truth_follows_the_sentences(table: ModuleType, tmp_path: Path) -> None:
    data = table.Medical(medical_like(tmp_path))
    assert data.tags == ["CAUSES", "NONE", "TREATS"]
    sample = data.sample(3, 0)
    assert (sample.counts == 3).all() and len(sample) == 120
    by_tag = [sample[torch.arange(tag, 120, 3)] for tag in range(3)]
    assert all(torch.equal(by_tag[0].annotator, other.annotator) for other in by_tag)  # the same judgements of each tag
    assert torch.equal(by_tag[1].label, 1 - (by_tag[0].label | by_tag[2].label))
    assert not torch.equal(data.sample(3, 1).annotator, sample.annotator)
    assert torch.equal(data.sample(3, 0).label, sample.label) and (data.sample(99, 0).counts == 7).all()
    treat = data.of_tag(sample, "treat")
    assert treat.item_id.tolist() == list(range(40)) and torch.equal(treat.label, by_tag[2].label)
    truth = pandas.read_csv(tmp_path / "medical_relations" / "truth_cause.csv").set_index("sentence_id")["expert"]
    ids = pandas.read_csv(tmp_path / "medical_relations" / "sentences.csv")["sentence_id"]
    assert data.expert["cause"].tolist() == [{1.0: 1, -1.0: 0}.get(truth[i], -1) for i in ids]


def test_auc(table: ModuleType) -> None:
    truth = torch.tensor([0, 1, 0, 1, 1])
    score = torch.tensor([0.1, 0.1, 0.4, 0.8, 0.2])
    pairs = [(s > t) + 0.5 * (s == t) for s in score[truth == 1].tolist() for t in score[truth == 0].tolist()]
    assert table.auc(score, truth) == pytest.approx(sum(pairs) / 6)
