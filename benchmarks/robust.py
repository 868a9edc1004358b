"""Whether a default falls below the votes: every aggregator and objective, as it is, on crowds it was not chosen on.

    CROWDNAL_DATA=DIR python benchmarks/robust.py labels|training|epochs|compare [--seeds 5] [--methods NAMES]
                                                  [--crowds NAMES] [--json FILE]

``labels``: accuracy of aggregated labels; ``training``: of a network on test items at the last epoch, where the one
trained on majority votes is the measure, and all have its schedule (Adam 1e-3 for everything). Each number is the
difference to the votes, in the mean of the seeds, and after ± its standard error over seeds (of the data of real crowds
that of the training alone); before them the mean over all crowds, the worst, and on how many crowds a method is more
than a point below, and by more than two standard errors. ``--json`` keeps the difference of each seed. Public sets are
of ``CROWDNAL_DATA``; simulated ones need nothing. Features of the 2,500 images of CIFAR-10N are computed once, in half
a minute.

``epochs``: whether to keep a tenth of the annotations out of training, and the epoch at which these are most likely:
test accuracy ahead of the last epoch of training on all of them.

``compare``: what ``crowdnal.compare`` takes for the crowd of the first seed, and how often its linear heads are right
about items they have not seen.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _tables import aggregation, cifar10n, lia, music
from _tables.labelme import label_data
from _tables.training import CLEAN, Data, Network, Recipe, train
from torch import Tensor, nn

import crowdnal
from crowdnal import Annotations, aggregate, compare, metrics, simulation
from crowdnal.aggregation import AGGREGATORS, check_method
from crowdnal.objectives import OBJECTIVES
from crowdnal.training import CANDIDATES

LABEL_SETS = ("weather", "web", "product", "polarity", "trec", "rte", "temporal", "bluebirds", "dog", "face")
TRAINING_SETS = (
    "labelme", "music", "product_pairs", "medical cause", "medical treat", "cifar10n", "cifar10n, one label",
)  # fmt: skip
REDUNDANCY = 3  # judgements a sentence of the medical relations, of fifteen
VOTES = "majority-vote"
LEFT_OUT = {"kos": "two classes", "label-model": "an optional library", "lia-ml": "many tags an item"}
PAPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dawid-skene, maximum likelihood": ("dawid-skene", {"confusion_prior": None}),  # the default it had
}
SLOW = ("mmce", "glad")  # hundreds of times as long as the others: by name alone

Differences = dict[str, dict[str, list[float]]]
"""By method and crowd: how far ahead of the votes, in shares of items, for each seed."""

# name: classes, items, annotators, labels an item, accuracy from and to, kind
SIMULATED: dict[str, tuple[int, int, int, int, float, float, str]] = {
    "good, 2 classes": (2, 400, 40, 3, 0.7, 0.95, "even"),
    "poor, 2 classes": (2, 400, 40, 3, 0.4, 0.7, "even"),
    "one label each": (4, 300, 900, 3, 0.5, 0.9, "even"),
    "one label an item": (4, 400, 20, 1, 0.6, 0.9, "even"),
    "poor, 5 classes": (5, 500, 25, 5, 0.4, 0.7, "even"),
    "20 classes": (20, 600, 40, 3, 0.5, 0.95, "even"),
    "uneven classes": (4, 500, 50, 3, 0.6, 0.95, "uneven"),
    "spammers": (4, 500, 30, 5, 0.6, 0.95, "spammers"),
    "adversaries": (3, 500, 30, 5, 0.6, 0.95, "adversaries"),
    "copies": (4, 500, 20, 5, 0.6, 0.9, "copies"),
    "common confusion": (4, 500, 40, 3, 0.6, 0.9, "common"),
    "hard items": (5, 600, 60, 5, 0.75, 0.98, "hard"),
}


def simulated(name: str, seed: int) -> tuple[Tensor, Annotations, Tensor, Tensor, Tensor]:
    """Features ``[N, 16]``, annotations, classes ``[N]``; features and classes of as many test items."""
    classes, items, annotators, per_item, low, high, kind = SIMULATED[name]
    generator = torch.Generator().manual_seed(seed)
    share = torch.ones(classes)
    if kind == "uneven":  # not the first most often, which ties of votes fall to
        share = 2.0 ** -torch.randperm(classes, generator=generator)
    truth = torch.multinomial(share, 2 * items, replacement=True, generator=generator)
    centers = 2.2 * nn.functional.normalize(torch.randn(classes, 16, generator=generator), dim=1)
    x = centers[truth] + torch.randn(2 * items, 16, generator=generator)
    rates = low + (high - low) * torch.rand(annotators, generator=generator)
    confusions = simulation.symmetric_confusions(annotators, classes, rates)
    some = torch.rand(annotators, generator=generator) < 0.25
    if kind == "spammers":
        confusions[some] = 1 / classes
    if kind == "adversaries":
        confusions[some] = simulation.symmetric_confusions(int(some.sum()), classes, 0.1)
    if kind == "common":
        confusions = 0.65 * confusions + 0.35 * torch.eye(classes).to(confusions).roll(1, 1)
    annotations = simulation.simulate(truth[:items], confusions, annotations_per_item=per_item, seed=seed)
    if kind == "hard":
        annotations = _fooled(annotations, centers, x[:items], truth[:items], generator)
    if kind == "copies":
        dense = annotations.to_dense(missing=-1)
        dense[:, 1:4] = torch.where(dense[:, 1:4] >= 0, dense[:, :1], -1)
        annotations = Annotations.from_dense(dense, num_classes=classes)
    return x[:items], annotations, truth[:items], x[items:], truth[items:]


def _fooled(
    annotations: Annotations, centers: Tensor, x: Tensor, truth: Tensor, generator: torch.Generator
) -> Annotations:
    """Of the half of the items that look most like another class, 45 % of the labels are that class."""
    distance = torch.cdist(x, centers)
    own = distance.gather(1, truth.unsqueeze(1)).squeeze(1)
    nearest, other = distance.scatter(1, truth.unsqueeze(1), torch.inf).min(1)
    hard = (nearest - own) < (nearest - own).median()
    item = annotations.item
    fooled = hard[item] & (torch.rand(len(item), generator=generator) < 0.45)
    label = torch.where(fooled, other[item], annotations.label)
    sizes = {"num_annotators": annotations.num_annotators, "num_classes": annotations.num_classes}
    return Annotations(annotations.indptr, annotations.annotator, label, **sizes)


def label_crowds(root: Path | None, wanted: list[str] | None, seeds: int) -> Iterator[tuple[str, list]]:
    """Names, and annotations with known classes for each seed."""
    for name in LABEL_SETS if root else ():
        if wanted is None or name in wanted:
            yield name, [aggregation.read(root, name)]
    for name in SIMULATED:
        if wanted is None or name in wanted:
            yield name, [simulated(name, seed)[1:3] for seed in range(seeds)]


def labels(root: Path | None, methods: list[str], crowds: list[str] | None, seeds: int) -> Differences:
    """Difference of each method's accuracy to the votes', by crowd."""
    found: Differences = {}
    for crowd, drawn in label_crowds(root, crowds, seeds):
        voted = [_right(aggregate(a, VOTES), truth) for a, truth in drawn]
        for method in methods:
            name, options = PAPERS.get(method, (method, {}))
            accuracies = [_right(aggregate(a, name, **options), truth) for a, truth in drawn]
            _tell(found, method, crowd, accuracies, voted)
    return found


def _right(posterior: Tensor, truth: Tensor) -> float:
    return metrics.accuracy(posterior[truth >= 0], truth[truth >= 0])


def training_crowds(root: Path | None, wanted: list[str] | None) -> Iterator[tuple[str, Callable[[int], Data]]]:
    """Names, and the data of each seed."""
    readers = {"labelme": _labelme, "music": music.read, "product_pairs": _product_pairs}
    readers |= {f"medical {task}": partial(_medical, task) for task in ("cause", "treat")}
    for name, per_item in (("cifar10n", 3), ("cifar10n, one label", 1)):
        readers[name] = partial(cifar10n.read, labels_per_item=per_item)
    for name in TRAINING_SETS if root else ():
        if root and (wanted is None or name in wanted):
            data = readers[name](root)
            yield name, lambda seed, data=data: data
    for name in SIMULATED:
        if wanted is None or name in wanted:
            yield name, lambda seed, name=name: _drawn(name, seed)


def _drawn(name: str, seed: int) -> Data:
    x, annotations, truth, x_test, test = simulated(name, seed)
    return Data(x, annotations, truth, x_test, test)


def _labelme(root: Path) -> Data:
    folder = root / "labelme"
    vgg = {s: torch.from_numpy(np.load(folder / f"vgg16_avg_{s}.npy")).flatten(1) for s in ("train", "test")}
    return label_data(folder, vgg)


def _product_pairs(root: Path) -> Data:
    features = np.load(root / "product_pairs" / "features.npz")
    x, x_test = (torch.from_numpy(features[s]).float() for s in ("train", "test"))
    annotations = Annotations.from_long(
        root / "product_pairs" / "annotations.csv", items=[str(i) for i in range(len(x))], classes=["0", "1"]
    )
    truth, test = (torch.from_numpy(features[f"{s}_truth"]).long() for s in ("train", "test"))
    return Data(x, annotations, truth, x_test, test)


def _medical(task: str, root: Path) -> Data:
    """Whether a sentence says that something causes, or treats, something; tested on those that experts know."""
    data = lia.Medical(root)
    expert = data.expert[task]
    known, rest = (expert >= 0).nonzero().squeeze(1), (expert < 0).nonzero().squeeze(1)
    annotations = data.of_tag(data.sample(REDUNDANCY, 0), task)[rest]
    annotations.item_id = torch.arange(len(rest))
    return Data(data.x[rest], annotations, expert[rest], data.x[known], expert[known])


def training(root: Path | None, methods: list[str], crowds: list[str] | None, seeds: int) -> Differences:
    """Difference of each objective's test accuracy to that of majority votes, by crowd."""
    found: Differences = {}
    for crowd, data_of in training_crowds(root, crowds):
        drawn = [data_of(seed) for seed in range(seeds)]
        recipe, run = _recipe(drawn[0]), list(enumerate(drawn))
        last = "accuracy_last"
        voted = [train(data, VOTES, {}, recipe, seed, heldout=False)[last] for seed, data in run]
        for method in methods:
            if method == CLEAN and bool((drawn[0].truth < 0).any()):
                continue  # nobody knows the classes of what it would be trained on
            accuracies = [train(data, method, {}, recipe, seed, heldout=False)[last] for seed, data in run]
            _tell(found, method, crowd, accuracies, voted)
    return found


def epochs(root: Path | None, methods: list[str], crowds: list[str] | None, seeds: int) -> dict[str, dict[str, float]]:
    """Difference of the test accuracy to that at the last epoch, trained on all annotations, by crowd."""
    found: dict[str, dict[str, float]] = {}
    for crowd, data_of in training_crowds(root, crowds):
        drawn = [data_of(seed) for seed in range(seeds)]
        recipe, run = _recipe(drawn[0]), list(enumerate(drawn))
        for method in methods:
            last = [train(data, method, {}, recipe, seed, heldout=False)["accuracy_last"] for seed, data in run]
            held = [train(data, method, {}, recipe, seed, heldout=True) for seed, data in run]
            _tell(found, f"{method}, last epoch", crowd, [one["accuracy_last"] for one in held], last)
            chosen = [one["accuracy_likelihood_selected"] for one in held]
            _tell(found, f"{method}, chosen epoch", crowd, chosen, last)
    return found


def _recipe(data: Data) -> Recipe:
    dim, classes = data.x.shape[1], data.annotations.num_classes

    def net() -> nn.Module:
        body = nn.Sequential(nn.Dropout(0.2), nn.Linear(dim, 64), nn.ReLU())
        return Network(body, nn.Dropout(0.2), 64, classes)

    passes = 15 if len(data.x) > 3000 else 40
    return Recipe(net, 64, passes, lr=1e-3, objective_lr=1e-3, batch_size=32, raw_features=True)


def compared(root: Path | None, methods: list[str], crowds: list[str] | None) -> dict[str, dict[str, Any]]:
    """By crowd: the objective taken, and the accuracy of each on items that its heads have not seen."""
    found = {}
    for crowd, data_of in training_crowds(root, crowds):
        data = data_of(0)
        choice = compare(data.x, data.annotations, methods, epochs=15 if len(data.x) > 3000 else 40)
        right = {name: _right(posterior, data.truth) for name, posterior in choice.posterior.items()}
        found[crowd] = {"taken": choice.method, "accuracy": right, "standard errors": choice.standard_errors}
        print(f"{crowd:20} {choice.method:16} {right}", file=sys.stderr, flush=True)
    return found


def choices(found: dict[str, dict[str, Any]]) -> str:
    """As Markdown, a row for each crowd."""
    methods = list(next(iter(found.values()))["accuracy"])
    rows = [f"| crowd | {' | '.join(methods)} | taken |", f"| --- {'| --: ' * len(methods)}| --- |"]
    for crowd, one in found.items():
        cells = " | ".join(f"{one['accuracy'][name]:.3f}".removeprefix("0") for name in methods)
        rows.append(f"| {crowd} | {cells} | {one['taken']} |")
    return "\n".join(rows)


def _tell(found: Differences, method: str, crowd: str, accuracies: list[float], voted: list[float]) -> None:
    ahead = [own - votes for own, votes in zip(accuracies, voted, strict=True)]
    found.setdefault(method, {})[crowd] = ahead
    print(f"{crowd:20} {method:24} {statistics.fmean(accuracies):.3f} {_cell(ahead)}", file=sys.stderr, flush=True)


def standard_error(ahead: list[float]) -> float:
    """Of the mean; 0 of one seed."""
    return statistics.stdev(ahead) / len(ahead) ** 0.5 if len(ahead) > 1 else 0.0


def _cell(ahead: list[float]) -> str:
    mean = f"{1000 * statistics.fmean(ahead):+.0f}"
    return mean if len(ahead) == 1 else f"{mean} ± {1000 * standard_error(ahead):.0f}"


def table(found: Differences) -> str:
    """As Markdown, a row for each method, the best mean first."""
    crowds = list(dict.fromkeys(crowd for ahead in found.values() for crowd in ahead))
    head = f"| method | mean | worst | below -.01 | beyond noise | {' | '.join(crowds)} |"
    rows = [head, "| --- " * (len(crowds) + 5) + "|"]
    means = {method: [statistics.fmean(one) for one in ahead.values()] for method, ahead in found.items()}
    for method in sorted(found, key=lambda method: -statistics.fmean(means[method])):
        ahead, values = found[method], means[method]
        below = [one for one, value in zip(ahead.values(), values, strict=True) if value < -0.01]
        sure = sum(statistics.fmean(one) < -2 * standard_error(one) for one in below)
        cells = " | ".join(_cell(ahead[crowd]) if crowd in ahead else "" for crowd in crowds)
        mean, worst = 1000 * statistics.fmean(values), 1000 * min(values)
        rows.append(f"| {method} | {mean:+.1f} | {worst:+.0f} | {len(below)}/{len(values)} | {sure} | {cells} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("labels", "training", "epochs", "compare"))
    parser.add_argument("--data", help="folder of the data sets (default: CROWDNAL_DATA; without, simulated ones only)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", metavar="NAME")
    parser.add_argument("--crowds", nargs="+", metavar="NAME")
    parser.add_argument("--json", type=Path, help="write the differences here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    given = arguments.data or os.environ.get("CROWDNAL_DATA")
    root = Path(given) if given else None
    if arguments.what == "compare":
        chosen = compared(root, arguments.methods or list(CANDIDATES), arguments.crowds)
        print(choices(chosen))
        if arguments.json:
            arguments.json.write_text(json.dumps(chosen, indent=1) + "\n")
        return
    if arguments.what == "labels":
        known = [name for name in AGGREGATORS if name not in (*LEFT_OUT, *SLOW)]
        methods = arguments.methods or [*known, *PAPERS]
        for method in methods:
            check_method(PAPERS.get(method, (method,))[0])
    elif arguments.what == "epochs":
        methods = arguments.methods or list(CANDIDATES)
    else:
        methods = arguments.methods or [CLEAN, *(name for name in OBJECTIVES if name not in LEFT_OUT)]
    run = {"labels": labels, "training": training, "epochs": epochs}[arguments.what]
    found = run(root, methods, arguments.crowds, arguments.seeds)
    base = "the last epoch with all annotations" if arguments.what == "epochs" else "the votes"
    print(f"Thousandths ahead of {base}, means of {arguments.seeds} seeds; crowdnal {crowdnal.__version__}\n")
    print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
