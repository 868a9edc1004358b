"""True labels from annotations alone: accuracy on five public data sets, and Dawid-Skene against crowd-kit's."""

from __future__ import annotations

import importlib.util
import math
import warnings
from pathlib import Path
from typing import Any

import pandas
import torch
from torch import Tensor

import crowdnal
from _tables.training import Row, row

TABLE = "aggregation of labels (rte, temporal, bluebirds, dog, face)"
NAMES = ("rte", "temporal", "bluebirds", "dog", "face")
METHODS: list[tuple[str, str, dict[str, Any]]] = [
    ("majority-vote", "majority-vote", {}),
    ("dawid-skene", "dawid-skene", {}),
    ("one-coin", "one-coin", {}),
    ("worker-clustering 3", "worker-clustering", {"num_clusters": 3}),
    ("mmce", "mmce", {}),
    ("mmce 1/4", "mmce", {"strength": 0.25}),
    ("glad", "glad", {}),
]
ITERATIONS = (1, 2, 50)
QUICK: dict[str, dict[str, Any]] = {"mmce": {"max_iterations": 2}, "glad": {"n_iter": 2}}


def run(root: Path, seeds: int, quick: bool) -> list[Row]:
    """Nothing here is drawn, so that there is one seed. ``accuracy`` is over the items whose class is known.

    ``largest_difference`` is that of posteriors of Dawid-Skene from crowd-kit's, from the same initial values (the vote
    proportions) after the same number of iterations. Without crowd-kit its rows and GLAD's are left out.
    """
    with_crowdkit = importlib.util.find_spec("crowdkit") is not None
    rows = []
    for name in ("bluebirds",) if quick else NAMES:
        annotations, truth = read(root, name)
        known = truth >= 0
        for label, method, options in METHODS:
            if method == "glad" and not with_crowdkit:
                continue
            options = {**options, **QUICK.get(method, {})} if quick else options
            posterior = crowdnal.aggregate(annotations, method, **options)
            accuracy = crowdnal.metrics.accuracy(posterior[known], truth[known])
            rows.append(row(TABLE, label, name, "accuracy", None, [accuracy]))
        for iterations in ITERATIONS[:2] if quick else ITERATIONS:
            if with_crowdkit:
                ours = crowdnal.dawid_skene(
                    annotations, max_iterations=iterations, tolerance=-1, confusion_prior=None
                ).posterior
                gap = float((ours - crowdkit_posterior(annotations, iterations)).abs().max())
                setting = f"{name}, {iterations} iteration{'s' * (iterations > 1)}"
                rows.append(row(TABLE, "dawid-skene", setting, "largest_difference", None, [gap]))
    return rows


def read(root: Path, name: str) -> tuple[crowdnal.Annotations, Tensor]:
    """Annotations, and the class of each item as a number of theirs (temporal's are 1 and 2), -1 where unknown."""
    annotations = crowdnal.Annotations.from_long(root / "aggregation" / f"{name}_annotations.csv")
    table = pandas.read_csv(root / "aggregation" / f"{name}_truth.csv", dtype={"task": str})
    classes = dict(zip(table["task"], table["label"], strict=True))
    ids = annotations.vocabulary
    assert ids is not None
    return annotations, torch.tensor([ids.classes.index(classes[i]) if i in classes else -1 for i in ids.items])


def crowdkit_posterior(annotations: crowdnal.Annotations, iterations: int) -> Tensor:
    """``[N, C]`` of crowd-kit's Dawid-Skene after so many iterations."""
    from crowdkit.aggregation import DawidSkene

    columns = {"task": annotations.item, "worker": annotations.annotator, "label": annotations.label}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        probas = DawidSkene(iterations, tol=-math.inf).fit(pandas.DataFrame(columns)).probas_
    return torch.from_numpy(probas.loc[range(len(annotations)), range(annotations.num_classes)].to_numpy().copy())
