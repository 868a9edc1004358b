"""Annotations of real data sets, in the folder that the environment variable CROWDNAL_DATA names."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from crowdnal.data import Annotations

DATA = os.environ.get("CROWDNAL_DATA")
pytestmark = pytest.mark.skipif(DATA is None, reason="CROWDNAL_DATA does not name the folder of real crowd data")


def test_labelme() -> None:
    folder = Path(DATA or "") / "labelme"
    a = Annotations.from_dense(np.loadtxt(folder / "answers.txt"), num_classes=8)
    truth = torch.from_numpy(np.loadtxt(folder / "labels_train.txt")).long()
    assert (len(a), a.num_annotators, a.num_annotations) == (1000, 59, 2547)
    assert int(a.counts.min()) == 1 and np.array_equal(a.to_dense(), np.loadtxt(folder / "answers.txt"))
    assert float((a.votes().argmax(1) == truth).double().mean()) == pytest.approx(0.769)


def test_music() -> None:
    path = Path(DATA or "") / "music" / "annotations.csv"
    a = Annotations.from_long(path)
    assert (len(a), a.num_annotators, a.num_annotations, a.num_classes) == (700, 44, 2945, 10)
    assert a.vocabulary is not None and a.vocabulary.classes[:3] == ("blues", "classical", "country")
    pd.testing.assert_frame_equal(
        a.to_long().sort_values(["task", "worker"], kind="stable", ignore_index=True),
        pd.read_csv(path, dtype=str).sort_values(["task", "worker"], kind="stable", ignore_index=True),
        check_dtype=False,
    )


def test_medical_relations_have_repeated_judgments() -> None:
    path = Path(DATA or "") / "medical_relations" / "judgments.csv"
    a = Annotations.from_long(path, task="sentence_id", label="relations")
    assert (len(a), a.num_annotators, a.num_annotations) == (3142, 466, 49_597)
    cell = a.item * a.num_annotators + a.annotator
    assert int((cell.unique(return_counts=True)[1] == 2).sum()) == 729
    with pytest.raises(ValueError, match="has more than one label"):
        a.to_dense()


@pytest.mark.parametrize(
    ("name", "items", "annotators"),
    [("rte", 800, 164), ("temporal", 462, 76), ("bluebirds", 108, 39), ("dog", 807, 109), ("face", 584, 27)],
)
def test_aggregation_sets(name: str, items: int, annotators: int) -> None:
    folder = Path(DATA or "") / "aggregation"
    a = Annotations.from_long(folder / f"{name}_annotations.csv")
    assert (len(a), a.num_annotators) == (items, annotators) and a.vocabulary is not None
    if name == "temporal":
        assert a.vocabulary.classes == (1, 2)
        with pytest.raises(ValueError, match="1-based"):
            Annotations.from_long(folder / "temporal_annotations.csv", classes=2)
    table = pd.read_csv(folder / f"{name}_annotations.csv", dtype={"task": str, "worker": str})
    votes = pd.crosstab(table.task, table.label).loc[list(a.vocabulary.items)]
    assert votes.columns.tolist() == list(a.vocabulary.classes)
    np.testing.assert_array_equal(a.votes().numpy(), votes.to_numpy())
    assert set(a.vocabulary.items) >= set(pd.read_csv(folder / f"{name}_truth.csv", dtype=str).task)
