"""The papers' tables on the papers' data, through the Python API.

    CROWDNAL_DATA=DIR python benchmarks/reproduce.py music [--seeds 5] [--json FILE] [--quick]

Rows: table, method, setting, metric, paper (the published number, by the authors' own selection), mean, std, seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import pandas
import torch
from torch import Tensor, nn

import crowdnal

# Chu et al. 2021, Table 1, Music; epochs were chosen on labelled data there, here the last epoch counts.
MUSIC_PAPER = {"majority-vote": 0.7253, "crowd-layer": 0.8146, "trace": 0.7912}
MUSIC_METHODS = ["majority-vote", "soft-majority-vote", "crowd-layer", "trace"]


def data_root(argument: str | None) -> Path:
    root = argument or os.environ.get("CROWDNAL_DATA")
    if not root or not Path(root).is_dir():
        sys.exit("no data: give --data DIR or set CROWDNAL_DATA to the folder that holds labelme/, music/, ...")
    return Path(root)


def read_music(root: Path) -> tuple[Tensor, crowdnal.Annotations, Tensor, Tensor, Tensor]:
    """Standardised train features [700, 124], annotations, train truth, test features [300, 124], test truth."""
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
    return (x - mean) / std, annotations, y, (x_test - mean) / std, y_test


def music_net() -> nn.Module:
    """The paper's: batch normalisation, 128 units, ReLU, batch normalisation, 50 % dropout, softmax layer."""
    return nn.Sequential(
        nn.BatchNorm1d(124), nn.Linear(124, 128), nn.ReLU(), nn.BatchNorm1d(128), nn.Dropout(0.5), nn.Linear(128, 10)
    )


def train_music(data: Any, method: str, seed: int, epochs: int) -> float:
    """Test accuracy at the last epoch: Adam 1e-2, all 700 items a batch (the authors' batch is 1,024)."""
    x, annotations, y, x_test, y_test = data
    torch.manual_seed(seed)
    net = music_net()
    targets = annotations
    if method == "clean labels":
        targets, method = y.unsqueeze(1), "majority-vote"
        objective = crowdnal.objectives.create(method, num_classes=10, num_annotators=1)
    else:
        objective = crowdnal.objectives.create(method, num_classes=10, num_annotators=annotations.num_annotators)
    model = crowdnal.attach(net, objective)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(epochs):
        model.train()
        objective.on_epoch_start(epoch)
        optimizer.zero_grad()
        model(x, targets).loss.backward()
        optimizer.step()
        objective.on_epoch_end(epoch)
    model.eval()
    with torch.no_grad():
        return crowdnal.metrics.accuracy(model(x_test), y_test)


def music(root: Path, seeds: int, quick: bool) -> list[dict[str, Any]]:
    data, epochs = read_music(root), 50 if quick else 200
    rows = []
    for method in ["clean labels", *MUSIC_METHODS]:
        values = [train_music(data, method, seed, epochs) for seed in range(seeds)]
        rows.append(
            {
                "table": "Chu et al. 2021, Table 1 (Music)",
                "method": method,
                "setting": f"124 features, MLP 128, Adam 1e-2, full batch, {epochs} epochs",
                "metric": "accuracy_last",
                "paper": MUSIC_PAPER.get(method),
                "mean": statistics.mean(values),
                "std": statistics.pstdev(values),
                "seeds": seeds,
            }
        )
        print(f"{method:20} {rows[-1]['mean']:.4f} +- {rows[-1]['std']:.4f}  (paper {rows[-1]['paper']})", flush=True)
    return rows


TABLES = {"music": music}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--data", help="folder of the data sets (default: CROWDNAL_DATA)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="fewer epochs: does it run, not what it reaches")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    rows = TABLES[arguments.table](data_root(arguments.data), arguments.seeds, arguments.quick)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
