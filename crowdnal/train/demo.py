"""``crowdnal demo``: digits that ship with scikit-learn, simulated annotators, the training command twice."""

from __future__ import annotations

import csv
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crowdnal import metrics, simulation
from crowdnal._utils.extras import require
from crowdnal.data import Annotations
from crowdnal.train import InputError, Result, TrainConfig, run
from crowdnal.train.outputs import majority
from crowdnal.train.progress import Reporter

OBJECTIVES = ("majority-vote", "feature-em")
_TRAIN_ITEMS = 1000
_TEST_ITEMS = 797  # the rest
_EPOCHS = 6
_LABELS_PER_ITEM = 4
_SIDE = 24
_MODEL = "test_resnet"


@dataclass(frozen=True)
class Crowd:
    """Simulated annotators: their true confusions ``[R, C, C]`` and the name of each, which says what it is."""

    confusions: Tensor
    names: tuple[str, ...]


def crowd(num_classes: int = 10, seed: int = 0) -> Crowd:
    """Nine careful annotators, seven who take most digits for the next one, and eight who guess."""
    generator = torch.Generator().manual_seed(seed)
    careful = simulation.symmetric_confusions(9, num_classes, 0.75 + 0.2 * torch.rand(9, generator=generator))
    flippers = simulation.pair_flip_confusions(
        7, num_classes, 0.25 + 0.2 * torch.rand(7, generator=generator), seed=None
    )
    spammers = simulation.symmetric_confusions(8, num_classes, 1 / num_classes)
    kinds = ["careful"] * 9 + ["flips"] * 7 + ["guesses"] * 8
    names = tuple(f"{kind}-{i + 1:02d}" for i, kind in enumerate(kinds))
    return Crowd(torch.cat([careful, flippers, spammers]), names)


def demo(out: Path | None, seed: int, reporter: Reporter) -> dict[str, Any]:
    """Run the demonstration.

    Args:
        out: folder for images and runs; None makes a temporary one.
        seed: of the annotators and of training.
        reporter: where lines and the table go.

    Returns:
        The numbers of the table.

    Raises:
        InputError: ``out`` holds a demonstration already.
    """
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="crowdnal-demo-")) if out is None else out
    if (folder / "annotations.csv").exists():
        raise InputError(f"--out {folder} holds a demonstration already: give another folder")
    annotators = crowd(seed=seed)
    labels = _write(folder, annotators, seed)
    reporter.say(f"wrote {_TRAIN_ITEMS} digits with labels of {len(annotators.names)} annotators to {folder}")

    base = TrainConfig(
        images=folder / "train", annotations=folder / "annotations.csv", truth=folder / "truth.csv",
        test_images=folder / "test", test_labels=folder / "test.csv", out=folder, model=_MODEL, image_size=_SIDE,
        augment="none", epochs=_EPOCHS, lr=4e-3, batch_size=50, seed=seed, threads=1,
    )  # fmt: skip
    results = {}
    for name in OBJECTIVES:
        config = replace(base, objective=name, out=folder / name)
        reporter.say(f"\n$ {config.command()}")
        results[name] = run(config, reporter=reporter)
    found = _compare(results, labels, annotators)
    _print(found, labels, annotators, folder, reporter)
    reporter.say(f"{time.monotonic() - start:.0f} s")
    return found


def _write(folder: Path, annotators: Crowd, seed: int) -> tuple[Annotations, Tensor]:
    """Images, annotations and truths as files; returns the annotations and the truth of the training items."""
    image_module = require("PIL.Image", extra="train")
    digits = require("sklearn.datasets", extra="train").load_digits()
    truth = torch.as_tensor(digits.target).long()
    order = torch.randperm(len(truth), generator=torch.Generator().manual_seed(seed))
    sets = {"train": order[:_TRAIN_ITEMS], "test": order[_TRAIN_ITEMS:][:_TEST_ITEMS]}
    tables: dict[str, list[tuple[str, int]]] = {}
    for name, rows in sets.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        tables[name] = []
        for place, row in enumerate(rows.tolist()):
            pixels = (digits.images[row] * (255 / 16)).astype("uint8")
            file = f"{place:04d}.png"
            image_module.fromarray(pixels).resize((_SIDE, _SIDE), 3).save(folder / name / file)
            tables[name].append((file, int(truth[row])))
    _table(folder / "truth.csv", ("task", "label"), tables["train"])
    _table(folder / "test.csv", ("task", "label"), tables["test"])
    annotations = simulation.simulate(
        truth[sets["train"]], annotators.confusions, annotations_per_item=_LABELS_PER_ITEM, seed=seed
    )
    _table(
        folder / "annotations.csv",
        ("task", "worker", "label"),
        [
            (tables["train"][i][0], annotators.names[r], k)
            for i, r, k in zip(
                annotations.item.tolist(), annotations.annotator.tolist(), annotations.label.tolist(), strict=True
            )
        ],
    )
    return annotations, truth[sets["train"]]


def _table(path: Path, header: tuple[str, ...], rows: list[Any]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def _compare(results: dict[str, Result], labels: tuple[Annotations, Tensor], annotators: Crowd) -> dict[str, Any]:
    annotations, truth = labels
    found: dict[str, Any] = {
        "vote": {"label_accuracy": metrics.accuracy(majority(annotations, annotations.num_classes), truth)}
    }
    for name, result in results.items():
        vocabulary = result.data.annotations.vocabulary
        assert vocabulary is not None
        place = {annotator: r for r, annotator in enumerate(vocabulary.annotators)}
        order = [place[annotator] for annotator in annotators.names]
        estimated = result.estimates.reliability[order]
        found[name] = {
            "test_accuracy": result.metrics["test_accuracy"],
            "label_accuracy": result.metrics["truth"]["label_accuracy"],
            "reliability_correlation": metrics.reliability_correlation(annotators.confusions, estimated),
        }
    return found


def _print(
    found: dict[str, Any], labels: tuple[Annotations, Tensor], annotators: Crowd, folder: Path, reporter: Reporter
) -> None:
    annotations, truth = labels
    right = float((annotations.label == truth[annotations.item]).double().mean())
    reporter.say("")
    columns = ["trained with", "test accuracy", "training-label accuracy", "reliability, correlation with truth"]
    rows = [["majority vote, no training", "", f"{found['vote']['label_accuracy']:.3f}", ""]]
    for name in OBJECTIVES:
        numbers = ("test_accuracy", "label_accuracy", "reliability_correlation")
        rows.append([name, *(f"{found[name][number]:.3f}" for number in numbers)])
    title = (
        f"Digits, {annotations.num_annotations} labels by {len(annotators.names)} annotators, {right:.0%} of them right"
    )
    reporter.table(columns, rows, title)
    reporter.say(f"report: {folder / OBJECTIVES[-1] / 'report.html'}")
