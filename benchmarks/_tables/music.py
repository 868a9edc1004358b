"""Music genres: Chu et al. 2021, Table 1, on the songs' 124 features."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas
import torch
from torch import nn

import crowdnal
from _tables.methods import options, wanted
from _tables.training import Data, Network, Recipe, Row, both, row

TABLE = "Chu et al. 2021, Table 1 (Music)"
PAPER = {
    "majority-vote": 0.7253, "crowd-layer": 0.8146, "doctor-net": 0.7658, "trace": 0.7912, "max-mig": 0.8137,
    "conal": 0.8406, "crowd-layer-over": 0.8047,
}  # fmt: skip
CONAL = {"embedding_dim": 80, "normalize_items": False, "confusion_prior": None}  # the authors', here


def run(root: Path, seeds: int, quick: bool, methods: Sequence[str] | None = None) -> list[Row]:
    """The authors' schedule: Adam 1e-2 for everything, all 700 songs a batch, 200 epochs, CoNAL's optimizer renewed.

    There are no validation songs. ``accuracy_clean_selected`` is the best epoch on the test songs, as published, and
    shown only to compare with what was published.
    """
    torch.set_num_threads(1)
    data, epochs, rows = read(root), 10 if quick else 200, []
    for label, method, given in wanted(methods, [("conal, authors' options", "conal", CONAL)]):
        renew = method == "conal"
        recipe = Recipe(net, 128, epochs, lr=1e-2, objective_lr=1e-2, raw_features=True, renew=renew)
        setting = f"124 features, MLP 128, Adam 1e-2{' renewed' if renew else ''}, all items a batch, {epochs} epochs"
        given = options(method, given, epochs)
        for metric, values in both(data, method, given, recipe, seeds).items():
            chosen, paper = setting, None
            if metric == "accuracy_clean_selected":
                chosen, paper = f"{setting}, epoch chosen on the test songs", PAPER.get(label.split(",")[0])
            rows.append(row(TABLE, label, chosen, metric, paper, values))
    return rows


def read(root: Path) -> Data:
    """Standardised features [700, 124] and [300, 124]; the test songs are the validation songs too."""
    train = pandas.read_csv(root / "music" / "music_genre_gold.csv")
    test = pandas.read_csv(root / "music" / "music_genre_test.csv")
    genres = sorted(train["class"].unique())
    annotations = crowdnal.Annotations.from_long(
        root / "music" / "annotations.csv", items=list(train["id"]), classes=genres
    )
    columns = [c for c in train.columns if c.startswith("feature")]
    x, x_test = (torch.tensor(t[columns].to_numpy(), dtype=torch.float32) for t in (train, test))
    mean, std = x.mean(0), x.std(0)
    y, y_test = (torch.tensor([genres.index(g) for g in t["class"]]) for t in (train, test))
    x_test = (x_test - mean) / std
    return Data((x - mean) / std, annotations, y, x_test, y_test, x_test, y_test)


def net() -> nn.Module:
    """The paper's: batch normalisation, 128 units, ReLU, batch normalisation, 50 % dropout, softmax layer."""
    body = nn.Sequential(nn.BatchNorm1d(124), nn.Linear(124, 128), nn.ReLU(), nn.BatchNorm1d(128))
    return Network(body, nn.Dropout(0.5), 128, 10)
