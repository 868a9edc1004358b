"""Cross-fitting on LabelMe and elsewhere: test accuracy at the last epoch, no clean label used.

    CROWDNAL_DATA=DIR python benchmarks/crossfit.py [--crowds NAMES] [--variants NAMES] [--seeds 5] [--json FILE]

A network on features (dropout .5, 128 units, dropout .5; Adam 1e-3, batches of 64) is trained on an objective's targets
as it is and with ``crowdnal.CrossFit``, on LabelMe (efficientnet-lite0 features, computed once), on Music, product
pairs and the simulated crowds of ``robust.py``. Settings are those of `VARIANTS`, the same for all crowds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _tables.labelme import label_data, lite0
from _tables.training import CLEAN, Data
from robust import SIMULATED, training_crowds
from torch import nn

import crowdnal
from crowdnal import Annotations, CrossFit, ObjectiveCallback, metrics
from crowdnal.objectives import RoundsObjective

FOLDS = 5


class Variant(NamedTuple):
    """What is trained: an objective, with options, with cross-fitting or without."""

    objective: str
    options: dict[str, Any]
    crossed: bool
    epochs: int


VARIANTS = {
    CLEAN: Variant("majority-vote", {}, False, 40),
    "clean labels, crossed": Variant("majority-vote", {}, True, 40),
    "majority-vote": Variant("majority-vote", {}, False, 40),
    "feature-em": Variant("feature-em", {}, False, 40),
    "feature-em, crossed": Variant("feature-em", {}, True, 40),
    "dl-em": Variant("dl-em", {"epochs_per_round": 10}, False, 60),
    "dl-em, crossed": Variant("dl-em", {"epochs_per_round": 10}, True, 60),
    "mbem": Variant("mbem", {"epochs_per_round": 20}, False, 60),
    "mbem, crossed": Variant("mbem", {"epochs_per_round": 20}, True, 60),
    "conal-em": Variant("conal-em", {"epochs_per_round": 10}, False, 60),
    "conal-em, crossed": Variant("conal-em", {"epochs_per_round": 10}, True, 60),
}


def crowds(root: Path | None, wanted: list[str] | None) -> Iterator[tuple[str, Callable[[int], Data]]]:
    """Names, and the data of each seed; LabelMe by the features of efficientnet-lite0."""
    if root is not None and (wanted is None or "labelme" in wanted):
        folder = root / "labelme"
        data = label_data(folder, {split: lite0(folder, split, False) for split in ("train", "test")})
        yield "labelme", lambda seed: data
    names = [name for name in ("music", "product_pairs", *SIMULATED) if wanted is None or name in wanted]
    if names:
        yield from training_crowds(root, names)


def network(dim: int, classes: int) -> nn.Module:
    """A head on features ``[B, D]``."""
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(dim, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, classes))


def accuracies(data: Data, variant: Variant, seed: int, clean: bool) -> dict[str, float]:
    """Of test items at the last epoch, and of the targets of the training items."""
    torch.manual_seed(seed)
    annotations = data.annotations
    if clean:
        annotations = Annotations.from_dense(data.truth.unsqueeze(1), num_classes=annotations.num_classes)
    sizes = {"num_classes": annotations.num_classes, "num_annotators": annotations.num_annotators}
    objective = crowdnal.objectives.create(variant.objective, **sizes, **variant.options)
    head = network(data.x.shape[1], annotations.num_classes)
    trained = CrossFit(head, annotations, folds=FOLDS, seed=seed) if variant.crossed else head
    model = crowdnal.attach(trained, objective, features=nn.Identity())
    everything = torch.arange(len(data.x))
    callback = ObjectiveCallback(model, [(data.x, annotations[everything])], annotations)
    optimizer = torch.optim.Adam(crowdnal.param_groups(model, 1e-3), lr=1e-3)
    labelled = (annotations.counts > 0).nonzero()[:, 0]
    for epoch in range(variant.epochs):
        callback.on_epoch_start(epoch)
        model.train()
        for rows in labelled[torch.randperm(len(labelled))].split(64):
            optimizer.zero_grad(set_to_none=True)
            model(data.x[rows], annotations[rows]).loss.backward()
            optimizer.step()
        callback.on_epoch_end(epoch)
    model.eval()
    with torch.no_grad():
        found = {"test": metrics.accuracy(model(data.x_test), data.test)}
        if isinstance(objective, RoundsObjective):
            found["labels"] = metrics.accuracy(objective.targets[labelled], data.truth[labelled])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of the data sets (default: CROWDNAL_DATA; without, simulated ones only)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--crowds", nargs="+", metavar="NAME")
    parser.add_argument("--variants", nargs="+", metavar="NAME", default=list(VARIANTS))
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    given = arguments.data or os.environ.get("CROWDNAL_DATA")
    found: dict[str, dict[str, Any]] = {}
    for crowd, data_of in crowds(Path(given) if given else None, arguments.crowds):
        for name in arguments.variants:
            start = time.perf_counter()
            runs = [accuracies(data_of(seed), VARIANTS[name], seed, "clean" in name) for seed in range(arguments.seeds)]
            columns = {key: [run[key] for run in runs] for key in runs[0]}
            seconds = round((time.perf_counter() - start) / arguments.seeds, 1)
            found.setdefault(crowd, {})[name] = {**columns, "seconds": seconds}
            told = {key: round(statistics.fmean(values), 4) for key, values in columns.items()}
            print(f"{crowd:20} {name:24} {told} {seconds} s", file=sys.stderr, flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"| crowd | {' | '.join(arguments.variants)} |\n| --- {'| --: ' * len(arguments.variants)}|")
    for crowd, row in found.items():
        cells = (f"{statistics.fmean(row[name]['test']):.3f}".removeprefix("0") for name in arguments.variants)
        print(f"| {crowd} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
