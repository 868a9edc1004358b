"""A part of CIFAR-10N, by the features of efficientnet-lite0: its first training images, and test images of each class.

The published worker ids have no detectable relation to skill: this tests what many annotators alike, of few labels
each, do to a method, and nothing about knowing them.
"""

from __future__ import annotations

import csv
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import torch

from _tables.labelme import cache_folder, pretrained
from _tables.training import Data
from crowdnal import Annotations

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN, TEST = 1500, 1000
BATCH = 10  # images that the same three people labelled
IMAGE_SIZE = 128


def read(root: Path, labels_per_item: int) -> Data:
    """The first 1, 2 or 3 labels of each image, with the people who gave them; features are computed once."""
    given = np.load(root / "cifar10n" / "human_labels.npz")
    with open(root / "cifar10n" / "side_info_cifar10N.csv", newline="") as stream:
        batches = [batch for batch, _ in zip(csv.DictReader(stream), range(TRAIN // BATCH), strict=False)]
    columns = range(1, labels_per_item + 1)
    workers = np.array([[batch[f"Worker{k}-id"] for k in columns] for batch in batches]).repeat(BATCH, 0)
    labels = np.stack([given[f"random_label{k}"][:TRAIN] for k in columns], 1)
    annotations = Annotations.from_long(
        {"task": np.arange(TRAIN).repeat(labels_per_item), "worker": workers.ravel(), "label": labels.ravel()},
        items=list(range(TRAIN)), classes=list(range(len(CLASSES))),
    )  # fmt: skip
    names = [f"train/{i:05}.jpg" for i in range(TRAIN)]
    names += [f"test/{label}/{i:04}.jpg" for label in CLASSES for i in range(TEST // len(CLASSES))]
    x, x_test = pretrained(_unpacked(root, names), IMAGE_SIZE).split((TRAIN, TEST))
    truth = torch.from_numpy(given["clean_label"][:TRAIN]).long()
    return Data(x, annotations, truth, x_test, torch.arange(len(CLASSES)).repeat_interleave(TEST // len(CLASSES)))


def _unpacked(root: Path, names: list[str]) -> list[Path]:
    """Files of the archive, in the user's cache."""
    folder = cache_folder() / "cifar10n"
    with ZipFile(root / "cifar10n" / "images.zip") as archive:
        for name in names:
            if not (folder / name).is_file():
                archive.extract(name, folder)
    return [folder / name for name in names]
