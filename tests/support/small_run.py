"""A small crowd on small pictures: what the tests of ``crowdnal train`` run on."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pandas
import torch
from PIL import Image

from crowdnal.train import Result, TrainConfig, run
from crowdnal.train.progress import Reporter

CLASSES = ("blue", "green", "red")
COLOURS = {"red": (200, 60, 60), "green": (60, 200, 60), "blue": (60, 60, 200)}
WORKERS = ("ann", "bob", "w 3", "w 10", "w 007")
N, T, UNSEEN = 36, 12, 3


def picture(path: Path, name: str, rng: np.random.Generator) -> None:
    noise = rng.integers(-50, 50, (20, 20, 3)) + np.array(COLOURS[name])
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise.clip(0, 255).astype("uint8")).save(path)


def write(root: Path) -> Path:
    """``train/<k>/iNN.png`` with annotations.csv and truth.csv, ``test/tNN.png`` with test.csv; some without labels."""
    rng = np.random.default_rng(0)
    rows, truths, tests = [], [], []
    for i in range(N + UNSEEN):
        name = CLASSES[i % 3]
        picture(root / "train" / str(i % 2) / f"i{i:02d}.png", name, rng)
        if i < N:
            truths.append((f"i{i:02d}", name))
            for worker in rng.permutation(len(WORKERS) - 1)[:3]:  # the last one labels nothing
                wrong = rng.random() < (0.9 if worker == 3 else 0.1)
                label = CLASSES[(i + 1) % 3] if wrong else name
                rows.append((f"i{i:02d}", WORKERS[worker], label))
    rows.append(("i00", WORKERS[-1], ""))
    for i in range(T):
        picture(root / "test" / f"t{i:02d}.png", CLASSES[i % 3], rng)
        tests.append((f"t{i:02d}.png", CLASSES[i % 3]))
    table(root / "annotations.csv", ("task", "worker", "label"), rows)
    table(root / "truth.csv", ("task", "label"), truths)
    table(root / "test.csv", ("task", "label"), tests)
    return root


def table(path: Path, header, rows) -> Path:
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def config(root: Path, out: Path, **changes) -> TrainConfig:
    values = dict(
        images=root / "train", annotations=root / "annotations.csv", truth=root / "truth.csv",
        test_images=root / "test", test_labels=root / "test.csv", out=out, model="test_resnet", image_size=32,
        objective="crowd-layer", epochs=3, batch_size=8, workers=0, threads=1, device="cpu",
        compare="nothing",
    )  # fmt: skip
    return TrainConfig(**{**values, **changes})


def frozen(root: Path, out: Path, **changes) -> TrainConfig:
    return config(root, out, **{"freeze_backbone": True, "lr": 0.02, **changes})


def arguments(config: TrainConfig) -> list[str]:
    """Of the command line."""
    import shlex

    return shlex.split(config.command())[1:]


def go(config: TrainConfig, **options) -> Result:
    return run(config, reporter=Reporter(quiet=True), **options)


def same_weights(a: Path, b: Path) -> bool:
    names = ("model.safetensors", "objective.safetensors", "history.csv", "labels.csv", "annotators.csv")
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


def read(path: Path) -> pandas.DataFrame:
    return pandas.read_csv(path, dtype={"annotator": str}, keep_default_na=False)


def images_of(files, transform) -> torch.Tensor:
    return torch.stack([transform(Image.open(file).convert("RGB")) for file in files])
