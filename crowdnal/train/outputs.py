"""What a run leaves behind: the model for timm, tables for people, numbers for programs."""

from __future__ import annotations

import csv
import inspect
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crowdnal import metrics
from crowdnal._utils.extras import require
from crowdnal.aggregation import choose, feature_em
from crowdnal.data import Annotations, of_classes
from crowdnal.objectives import Objective
from crowdnal.train.data import TrainingData
from crowdnal.train.files import ERRORS, atomic, write_text

MODEL_FILES = ("model.safetensors", "config.json", "objective.safetensors")
ANNOTATOR_COLUMNS = ("reliability", "reliability_low", "reliability_high", "spammer_score")
TABLE_FILES = ("annotators.csv", "labels.csv", "history.csv", "metrics.json", "report.html")


@dataclass(frozen=True)
class Estimates:
    """What a trained model says about items and annotators, on the CPU.

    Attributes:
        probs: ``[N, C]`` of the classifier alone.
        posterior: ``[N, C]`` given annotations and features; see :func:`crowdnal.feature_em`.
        confusion: ``[R, C, K]`` rows = true class.
        reliability: ``[R]`` share of right labels, see :func:`crowdnal.metrics.annotator_accuracy`.
        reliability_low: ``[R]`` of its 90 % interval.
        reliability_high: ``[R]``.
        spammer_score: ``[R]``.
        num_labels: ``[R]`` labels each annotator gave.
        from_model: whether the confusions are the objective's own, or counted against the classifier.
        test_probs: ``[T, C]``.
    """

    probs: Tensor
    posterior: Tensor
    confusion: Tensor
    reliability: Tensor
    reliability_low: Tensor
    reliability_high: Tensor
    spammer_score: Tensor
    num_labels: Tensor
    from_model: bool
    test_probs: Tensor


def estimate(
    objective: Objective,
    logits: Tensor,
    annotations: Annotations,
    item_features: Tensor | None,
    gold: Tensor,
    test_logits: Tensor,
) -> Estimates:
    """What is reported, from a trained objective.

    The labels are not those of the trained classifier, which repeats what it was trained on: they are made from the
    annotations and from features, each item's by what the others' labels make of these.

    Args:
        objective: trained.
        logits: ``[N, C]`` of all images.
        annotations: of all images.
        item_features: ``[N, D]`` of all images, of given weights before training, else after it; None for annotations
            alone.
        gold: ``[N]`` known classes, -1 where unknown.
        test_logits: ``[T, C]``.
    """
    probs = logits.double().softmax(-1)
    votes = of_classes(annotations, logits.shape[1])
    if item_features is None:
        posterior = choose(votes).posterior
        known = torch.nn.functional.one_hot(gold.clamp(min=0), logits.shape[1]).double()
        posterior = known.where((gold >= 0).unsqueeze(1), posterior)
    else:
        posterior = feature_em(item_features, votes, gold=gold).posterior
    if objective.models_annotators:
        confusion = objective.confusion().detach().cpu().double()
    else:
        confusion = metrics.empirical_confusion(probs.cpu(), annotations, smoothing=1.0)
    accuracy = metrics.annotator_accuracy(posterior, annotations)
    return Estimates(
        probs=probs.cpu(),
        posterior=posterior.cpu(),
        confusion=confusion,
        reliability=accuracy.mean,
        reliability_low=accuracy.low,
        reliability_high=accuracy.high,
        spammer_score=metrics.spammer_score(confusion),
        num_labels=torch.bincount(annotations.annotator, minlength=annotations.num_annotators),
        from_model=objective.models_annotators,
        test_probs=test_logits.double().softmax(-1).cpu(),
    )


def majority(annotations: Annotations, num_classes: int) -> Tensor:
    """``[N]`` class with most labels, the first of equals, -1 without labels; what is no class does not vote."""
    votes = annotations.votes()[:, :num_classes]
    return torch.where(votes.sum(1) > 0, votes.argmax(1), -1)


def measure(data: TrainingData, estimates: Estimates) -> dict[str, Any]:
    """Accuracies against known truths, for ``metrics.json``."""
    found: dict[str, Any] = {}
    if len(data.test):
        found["test_accuracy"] = metrics.accuracy(estimates.test_probs, data.test.truth)
        found["test_calibration_error"] = metrics.expected_calibration_error(estimates.test_probs, data.test.truth)
    known = (data.annotations.counts > 0) & (data.images.truth >= 0)
    if bool(known.any()):
        truth = data.images.truth[known]
        found["truth"] = {
            "items": len(truth),
            "label_accuracy": metrics.accuracy(estimates.posterior[known], truth),
            "model_accuracy": metrics.accuracy(estimates.probs[known], truth),
            "majority_vote_accuracy": metrics.accuracy(majority(data.annotations, len(data.classes))[known], truth),
        }
    given = estimates.num_labels > 0
    found["mean_reliability"] = float(estimates.reliability[given].mean())
    found["mean_spammer_score"] = float(estimates.spammer_score[given].mean())
    found["confusion_source"] = "objective" if estimates.from_model else "counted against the classifier"
    return found


def write_tables(out: Path, data: TrainingData, estimates: Estimates, history: Sequence[dict[str, Any]]) -> None:
    """``annotators.csv``, ``labels.csv`` and ``history.csv``."""
    vocabulary = data.annotations.vocabulary
    assert vocabulary is not None
    rows: list[list[Any]] = []
    for r, annotator in enumerate(vocabulary.annotators):
        count = int(estimates.num_labels[r])
        values = [f"{float(getattr(estimates, name)[r]):.6f}" for name in ANNOTATOR_COLUMNS]
        rows.append([annotator, count, *(values if count else [""] * len(values))])  # nothing is known of them
    _write_csv(out / "annotators.csv", ["annotator", "num_labels", *ANNOTATOR_COLUMNS], rows)

    label, model = estimates.posterior.max(1), estimates.probs.max(1)
    names = data.classes
    columns = (
        data.images.ids, label.indices.tolist(), label.values.tolist(), model.indices.tolist(), model.values.tolist(),
        data.annotations.counts.tolist(), majority(data.annotations, len(names)).tolist(),
    )  # fmt: skip
    _write_csv(
        out / "labels.csv",
        ["item", "label", "probability", "model_label", "model_probability", "num_labels", "majority_vote"],
        (
            [item, names[k], f"{p:.6f}", names[m], f"{q:.6f}", count, names[vote] if vote >= 0 else ""]
            for item, k, p, m, q, count, vote in zip(*columns, strict=True)
        ),
    )
    numbers = list(history[0])
    _write_csv(
        out / "history.csv", numbers, (["" if row[name] is None else row[name] for name in numbers] for row in history)
    )


def save_model(
    folder: Path, model: nn.Module, objective: Objective, classes: Sequence[str], input_size: Sequence[int]
) -> None:
    """Save through timm, so that ``timm.create_model("local-dir:FOLDER", pretrained=True)`` loads the model."""
    save_for_hf = require("timm.models", extra="train").save_for_hf
    safetensors = require("safetensors.torch", extra="train")
    folder.mkdir(parents=True, exist_ok=True)
    model = model.cpu().to(memory_format=torch.contiguous_format)
    arguments: dict[str, Any] = {"model_config": {"label_names": list(classes)}, "safe_serialization": True}
    if "data_config" in inspect.signature(save_for_hf).parameters:
        arguments["data_config"] = {"input_size": tuple(input_size)}
    temporary = folder / ".saving"
    save_for_hf(model, temporary, **arguments)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in objective.state_dict().items()}
    # one key: safetensors writes several in random order, and equal runs should give equal files
    metadata = {"crowdnal": json.dumps({"objective": objective.name, "classes": list(classes)})}
    safetensors.save_file(tensors, temporary / "objective.safetensors", metadata=metadata)
    for name in MODEL_FILES:  # safetensors lets nobody else read what it writes
        shutil.copymode(temporary / "config.json", temporary / name)
    for name in MODEL_FILES:
        (temporary / name).replace(folder / name)
    temporary.rmdir()


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with atomic(path) as temporary, open(temporary, "w", newline="", encoding="utf-8", errors=ERRORS) as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def write_report(out: Path, html: str) -> None:
    """``report.html``."""
    write_text(out / "report.html", html)
