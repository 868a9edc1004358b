"""benchmarks/_tables/cifar10n.py on an archive of forty images."""

from __future__ import annotations

import importlib
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import torch


@pytest.mark.parametrize("per_item", [1, 3])
def test_labels_are_of_the_people_of_their_batch(per_item, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    cifar10n = importlib.import_module("_tables.cifar10n")
    monkeypatch.setattr(cifar10n, "TRAIN", 40)
    monkeypatch.setattr(cifar10n, "TEST", 20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    seen = []
    monkeypatch.setattr(cifar10n, "pretrained", lambda files, size: seen.extend(files) or torch.arange(60.0)[:, None])
    folder = tmp_path / "cifar10n"
    folder.mkdir()
    generator = np.random.default_rng(0)
    given = {f"random_label{k}": generator.integers(0, 10, 100).astype(np.uint8) for k in (1, 2, 3)}
    truth = generator.integers(0, 10, 100).astype(np.uint8)
    np.savez(folder / "human_labels.npz", clean_label=truth, **given)
    people = [(7, 5, 9), (5, 7, 1), (9, 2, 5), (3, 9, 7), (8, 6, 4)]
    head = "Image-batch,Worker1-id,Worker2-id,Worker3-id"
    rows = [f"{b}0--{b}9,{','.join(map(str, ids))}" for b, ids in enumerate(people)]
    (folder / "side_info_cifar10N.csv").write_text("\n".join([head, *rows]))
    with ZipFile(folder / "images.zip", "w") as archive:
        for name in [f"train/{i:05}.jpg" for i in range(50)]:
            archive.writestr(name, name)
        for name in [f"test/{label}/{i:04}.jpg" for label in cifar10n.CLASSES for i in range(3)]:
            archive.writestr(name, name)

    data = cifar10n.read(tmp_path, per_item)

    a = data.annotations
    assert a.num_annotations == 40 * per_item and a.num_classes == 10 and data.truth.tolist() == truth[:40].tolist()
    names = a.vocabulary.annotators
    found = {(int(i), str(names[r]), int(y)) for i, r, y in zip(a.item, a.annotator, a.label, strict=True)}
    assert found == {
        (i, str(people[i // 10][k]), int(given[f"random_label{k + 1}"][i])) for i in range(40) for k in range(per_item)
    }
    assert [path.read_text() for path in seen[:40]] == [f"train/{i:05}.jpg" for i in range(40)]
    assert [path.read_text() for path in seen[-2:]] == ["test/truck/0000.jpg", "test/truck/0001.jpg"]
    assert data.x[:, 0].tolist() == list(range(40)) and data.test.tolist() == [i // 2 for i in range(20)]
