"""CCC beside CrowdLayer and CoNAL: simulated sparse annotators on scikit-learn's digits, and LabelMe.

"crowd-layer, two networks" is CCC with its corrections switched off: what an ensemble alone gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import crowdnal
from _tables.labelme import label_data, lite0
from _tables.methods import NO_PRIOR
from _tables.training import Data, Network, Recipe, Row, row, train
from crowdnal.simulation import sparse_crowd

TABLE = "Zhang et al. 2024, Table 1 and Figure 4, on digits"
TRAIN = 1200
# annotators, and annotations of an image: the paper's number of annotators, with 5 to 14 labels each; and a fifth of it
CROWDS = ((250, (1, 2, 3)), (50, (1, 3, 9)))
PATTERNS = ("IND-I", "COR-I")
METRIC = "accuracy_last"
# last epoch, percent there: Table 2
LABELME_PAPER = {"crowd-layer": 0.8232, "conal": 0.8485, "ccc": 0.8479}


@dataclass(frozen=True)
class Coupled:
    """CCC's own options."""

    num_groups: int
    warmup_epochs: int
    meta_size: int


def run(root: Path, seeds: int, quick: bool, patterns: Sequence[str] = ()) -> list[Row]:
    """Both, or the digits alone with these patterns of annotators."""
    torch.set_num_threads(1)
    if patterns:
        return digits(min(seeds, 3), quick, patterns)
    return digits(min(seeds, 3), quick) + labelme(root, seeds, quick)


def digits(seeds: int, quick: bool, settings: Sequence[str] = PATTERNS) -> list[Row]:
    """Accuracy at the last epoch as annotations get sparser; the same schedule for every method."""
    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = (x.float() / 8 - 1)[order], y[order]
    epochs = 2 if quick else 60
    recipe = Recipe(digits_net, 128, epochs, lr=1e-3, objective_lr=1e-3, batch_size=128, raw_features=True)
    coupled = Coupled(num_groups=15, warmup_epochs=1 if quick else 10, meta_size=200)
    rows = []
    crowds = [(size, per_item[-1:]) for size, per_item in CROWDS[-1:]] if quick else CROWDS
    cells = [(patterns, size, k) for size, per_item in crowds for patterns in settings for k in per_item]
    for patterns, annotators, per_item in cells:
        found: dict[str, list[float]] = {}
        for seed in range(seeds):
            annotations = sparse_crowd(
                y[:TRAIN], patterns, num_annotators=annotators, annotations_per_item=per_item, seed=seed
            ).annotations
            data = Data(x[:TRAIN], annotations, y[:TRAIN], x[TRAIN:], y[TRAIN:])
            for method, value in each(data, recipe, coupled, seed).items():
                found.setdefault(method, []).append(value)
        setting = f"{patterns}, {per_item} an item, {annotators} annotators, MLP 128-128, Adam 1e-3, {epochs} epochs"
        rows += [row(TABLE, method, setting, METRIC, None, values) for method, values in found.items()]
    return rows


def digits_net() -> nn.Module:
    """Two hidden layers of 128."""
    body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
    return Network(body, nn.Identity(), 128, 10)


def labelme(root: Path, seeds: int, quick: bool) -> list[Row]:
    """On efficientnet-lite0 features, with the schedule of the table of all objectives."""
    folder, epochs = root / "labelme", 2 if quick else 60
    data = label_data(folder, {split: lite0(folder, split, quick) for split in ("train", "test")})

    def net() -> nn.Module:
        body = nn.Sequential(nn.Dropout(0.5), nn.Linear(1280, 128), nn.ReLU())
        return Network(body, nn.Dropout(0.5), 128, 8)

    recipe = Recipe(net, 128, epochs, lr=1e-3, objective_lr=1e-2, batch_size=64)
    # the paper's meta set is a tenth of the images (augmented tenfold there), its warm-up a quarter of the epochs
    coupled = Coupled(num_groups=25, warmup_epochs=1 if quick else 15, meta_size=100)
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        for method, value in each(data, recipe, coupled, seed).items():
            found.setdefault(method, []).append(value)
    setting = f"efficientnet-lite0 features, MLP 128, Adam 1e-3 (objective 1e-2), batch 64, {epochs} epochs"
    return [row("LabelMe", m, setting, METRIC, LABELME_PAPER.get(m), values) for m, values in found.items()]


def each(data: Data, recipe: Recipe, coupled: Coupled, seed: int) -> dict[str, float]:
    """Test accuracy of every method at the last epoch."""
    plain = {m: train(data, m, NO_PRIOR, recipe, seed, heldout=False)[METRIC] for m in ("crowd-layer", "conal")}
    two = train_coupled(data, recipe, coupled, seed, correction_rate=0.0)
    return {**plain, "crowd-layer, two networks": two, "ccc": train_coupled(data, recipe, coupled, seed)}


def train_coupled(data: Data, recipe: Recipe, coupled: Coupled, seed: int, **options: Any) -> float:
    """Test accuracy of CCC at the last epoch."""
    torch.manual_seed(seed)
    sizes = data.annotations.num_classes, data.annotations.num_annotators
    models = [crowdnal.attach(recipe.net(), crowdnal.CrowdLayer(*sizes)) for _ in range(2)]
    ccc = crowdnal.CCC(*models, **vars(coupled), meta_batch_size=recipe.batch_size or 128, seed=seed, **options)
    ccc.on_train_start(crowdnal.CrowdDataset(data.x, data.annotations))
    pair = [
        torch.optim.Adam(
            [{"params": m.backbone.parameters()}, {"params": m.objective.parameters(), "lr": recipe.objective_lr}],
            lr=recipe.lr,
        )
        for m in models
    ]
    annotated = (data.annotations.counts > 0).nonzero().squeeze(1)
    for epoch in range(recipe.epochs):
        ccc.on_epoch_start(epoch)
        ccc.train()
        for chosen in annotated[torch.randperm(len(annotated))].split(recipe.batch_size or len(annotated)):
            ccc.step((data.x[chosen], data.annotations[chosen]), pair[0], pair[1])
    return crowdnal.metrics.accuracy(_logits(ccc, data.x_test), data.test)


@torch.no_grad()
def _logits(ccc: crowdnal.CCC, x: Tensor) -> Tensor:
    ccc.eval()
    return ccc(x)
