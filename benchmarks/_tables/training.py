"""What the tables share: rows, and a plain training loop with the three ways to choose an epoch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import crowdnal
from crowdnal.train.session import split

Row = dict[str, Any]
CLEAN = "clean labels"
HELDOUT = 0.1  # of the annotations, where the epoch is chosen by their likelihood


@dataclass(frozen=True)
class Data:
    """Inputs and classes of the three splits; annotations of the training split."""

    x: Tensor
    annotations: crowdnal.Annotations
    truth: Tensor
    x_test: Tensor
    test: Tensor
    x_valid: Tensor | None = None
    valid: Tensor | None = None


@dataclass(frozen=True)
class Recipe:
    """How a network is trained.

    Attributes:
        net: makes one that gives ``(logits, features)``.
        feature_dim: of these features.
        raw_features: an objective that needs features gets the network's input instead of them.
        batch_size: None = all items.
        renew: the optimizer is made anew every epoch, as CoNAL's authors do.
    """

    net: Callable[[], nn.Module]
    feature_dim: int
    epochs: int
    lr: float
    objective_lr: float
    batch_size: int | None = None
    raw_features: bool = False
    renew: bool = False


class Network(nn.Module):
    """``body``, whose outputs are the features, and a linear classifier behind ``drop``."""

    def __init__(self, body: nn.Module, drop: nn.Module, feature_dim: int, classes: int) -> None:
        super().__init__()
        self.body, self.drop, self.classifier = body, drop, nn.Linear(feature_dim, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, C]`` and features ``[B, D]``."""
        features = self.drop(self.body(x))
        return self.classifier(features), features


def row(table: str, method: str, setting: str, metric: str, paper: float | None, values: Iterable[float]) -> Row:
    """A row of a table, printed as it is made."""
    numbers = list(values)
    mean, std = statistics.fmean(numbers), statistics.pstdev(numbers)
    print(f"{method:24} {metric:30} {mean:.4f} +- {std:.4f}  (paper {paper})  {setting}", flush=True)
    return {
        "table": table, "method": method, "setting": setting, "metric": metric, "paper": paper, "mean": mean,
        "std": std, "seeds": len(numbers),
    }  # fmt: skip


def both(data: Data, method: str, options: dict[str, Any], recipe: Recipe, seeds: int) -> dict[str, list[float]]:
    """Metric -> a value for each seed: likelihood selects in runs of its own, that keep annotations out of training."""
    found = [train(data, method, options, recipe, seed, heldout=False) for seed in range(seeds)]
    columns = {metric: [values[metric] for values in found] for metric in found[0]}
    if method != CLEAN:
        metric = "accuracy_likelihood_selected"
        columns[metric] = [train(data, method, options, recipe, s, heldout=True)[metric] for s in range(seeds)]
    return columns


def train(
    data: Data, method: str, options: dict[str, Any], recipe: Recipe, seed: int, *, heldout: bool
) -> dict[str, float]:
    """Test accuracy at the last epoch and at the chosen ones.

    Args:
        method: an objective's name, or ``CLEAN`` for training on the true classes, which knows no other epoch.
        options: of the objective.
        heldout: keep a tenth of the annotations out of training; their likelihood chooses an epoch.

    Returns:
        ``accuracy_last``, with ``heldout`` also ``accuracy_likelihood_selected``, with a validation split also
        ``accuracy_clean_selected``.
    """
    torch.manual_seed(seed)
    annotations, held = split(data.annotations, HELDOUT if heldout else 0.0, seed)
    if method == CLEAN:
        annotations = crowdnal.Annotations.from_dense(data.truth.unsqueeze(1), num_classes=annotations.num_classes)
        method, options, held = "majority-vote", {}, None
    sizes = {"num_classes": annotations.num_classes, "num_annotators": annotations.num_annotators}
    objective = crowdnal.objectives.create(method, **sizes, **options)
    raw = recipe.raw_features and objective.needs_features
    objective.set_feature_dim(data.x.shape[1] if raw else recipe.feature_dim)
    model = crowdnal.attach(recipe.net(), objective, features=nn.Identity() if raw else None)
    annotated = (annotations.counts > 0).nonzero().squeeze(1)
    optimizer = _optimizer(model, recipe)
    best: dict[str, float] = {}
    found: dict[str, float] = {}
    objective.on_train_start(annotations, lambda: _predict(model, data.x))
    for epoch in range(recipe.epochs):
        objective.on_epoch_start(epoch)
        if recipe.renew:
            optimizer = _optimizer(model, recipe)
        model.train()
        for chosen in annotated[torch.randperm(len(annotated))].split(recipe.batch_size or len(annotated)):
            optimizer.zero_grad()
            model(data.x[chosen], annotations[chosen]).loss.backward()
            optimizer.step()
        objective.on_epoch_end(epoch)
        criteria = {"accuracy_last": 0.0} if epoch + 1 == recipe.epochs else {}
        if held is not None:
            logits, features = _predict(model, data.x)
            criteria["accuracy_likelihood_selected"] = float(objective.log_likelihood(logits, held, features).mean())
        if data.x_valid is not None and data.valid is not None:
            chosen_by = crowdnal.metrics.accuracy(_predict(model, data.x_valid)[0], data.valid)
            criteria["accuracy_clean_selected"] = chosen_by
        better = [metric for metric, value in criteria.items() if metric not in best or value > best[metric]]
        if better:
            accuracy = crowdnal.metrics.accuracy(_predict(model, data.x_test)[0], data.test)
            best |= {metric: criteria[metric] for metric in better}
            found |= dict.fromkeys(better, accuracy)
    return found


def _optimizer(model: crowdnal.CrowdModel, recipe: Recipe) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": list(model.backbone.parameters())}]
    if own := list(model.objective.parameters()):
        groups.append({"params": own, "lr": recipe.objective_lr})
    return torch.optim.Adam(groups, lr=recipe.lr)


@torch.no_grad()
def _predict(model: crowdnal.CrowdModel, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The objective's logits and the features it needs, in evaluation mode."""
    model.eval()
    logits, features = model.logits_and_features(x)
    return model.objective.predict(logits, features), features
