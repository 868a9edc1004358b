"""Which objective suits a crowd: by labels foreseen by classifiers that have never seen the labels of their item."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from crowdnal._utils.folds import deal
from crowdnal._utils.options import check_amount, check_integer, typed
from crowdnal._utils.threads import threads, threads_of_step
from crowdnal.aggregation.em import (
    check_features,
    crowd_confusion,
    crowd_strength,
    log_proportions,
    standard_errors,
    weights_of,
)
from crowdnal.data import Annotations, as_gold
from crowdnal.functional import label_counts, segment_sum
from crowdnal.objectives import Objective, create
from crowdnal.training._callbacks import ObjectiveCallback
from crowdnal.training._model import attach
from crowdnal.training._optim import param_groups
from crowdnal.training._predict import predict_items

VOTES = "majority-vote"
_POWERS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)
CANDIDATES = (VOTES, "feature-em", "dl-ds", "crowd-layer", "conal", "geocrowdnet")


@dataclass
class Comparison:
    """What :func:`compare` found.

    Attributes:
        method: the objective to train with.
        why: the reason, as a sentence.
        log_likelihood: of each objective, the mean log-probability of labels of items that it had not seen.
        standard_errors: of each, by how many of them its labels are foreseen better than with the votes.
        posterior: of each, ``[N, C]`` predictions of the items, each by the classifier that had not seen it.
    """

    method: str
    why: str
    log_likelihood: dict[str, float]
    standard_errors: dict[str, float]
    posterior: dict[str, Tensor]

    def __str__(self) -> str:
        best_first = sorted(self.log_likelihood, key=lambda name: -self.log_likelihood[name])
        rows = [f"{n:20} {self.log_likelihood[n]:8.4f} {self.standard_errors[n]:+6.1f}" for n in best_first]
        return "\n".join(["objective            held-out  errors", *rows, f"{self.method}: {self.why}"])


@typed
def compare(
    features: Tensor,
    annotations: Annotations,
    methods: Sequence[str] = CANDIDATES,
    *,
    num_classes: int | None = None,
    head: Callable[[], nn.Module] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    gold: Any = None,
    folds: int = 5,
    epochs: int = 40,
    batch_size: int = 64,
    lr: float = 1e-3,
    objective_lr: float | None = None,
    margin: float = 2.0,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Train a small head on the features with each objective, and compare what they say of items not trained on.

    The items are dealt into folds, and the labels of a fold are foreseen by a head that was trained on the others
    (cross-fitting): one of annotator r on item i is y with the probability ``Σ_k q_i[k] A_r[k, y]``, where q is the
    head's prediction and the confusions A are counted on the other folds' labels against the predictions of their
    items, with the crowd's as a prior. That is one measure whatever the objective's own link. An objective is taken
    if it foresees labels better than majority votes do, by more than ``margin`` standard errors over items. Ours, after
    the cross-fitting of Chernozhukov et al. (2018).

    Args:
        features: ``[N, D]`` of all items, such as a frozen backbone's pre-logits.
        annotations: of the same N items.
        methods: names of objectives; the votes are always among them.
        num_classes: C, where the annotations' labels have answers that are no classes behind them.
        head: makes a module from ``[B, D]`` to logits ``[B, C]``. Default: dropout of a half and a linear layer, on
            standardised features.
        options: of an objective, by its name.
        gold: known true classes, as :func:`crowdnal.data.as_gold` takes them; those of a fold are not seen either.
        folds: 2 or more.
        epochs: of each head, 1 or more.
        batch_size: items a step.
        lr: of Adam, for the heads.
        objective_lr: the same for the objectives; ``lr`` where not given.
        margin: standard errors, 0 or more.
        seed: of folds, weights and order; the same for every objective.
        progress: is told the name of each objective when its heads are trained.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    check_integer(2, folds=folds)
    check_integer(1, epochs=epochs, batch_size=batch_size)
    check_amount(lr=lr, objective_lr=lr if objective_lr is None else objective_lr, margin=margin)
    classes = annotations.num_classes if num_classes is None else num_classes
    check_features(features, annotations)
    labelled = int((annotations.counts > 0).sum())
    if labelled < 2 * folds:
        raise ValueError(f"annotations has {labelled} items with labels, too few for folds={folds}: give two for each")
    known = None if gold is None else as_gold(gold, annotations, classes)
    x = features.detach()
    if head is None:
        x = (x - x.mean(0)) / x.std(0, correction=0).clamp(min=1e-6)
        dim = x.shape[1]

        def head() -> nn.Module:
            return nn.Sequential(nn.Dropout(0.5), nn.Linear(dim, classes))

    fold = deal(len(x), folds, seed)
    run = _Run(x, annotations, classes, head, known, fold, epochs, batch_size, lr, objective_lr, seed)
    names = list(dict.fromkeys([VOTES, *methods]))
    given = {name: (options or {}).get(name, {}) for name in names}
    with torch.random.fork_rng([]):
        for name in names:  # before any is trained
            run.objective(name, given[name])
    posterior: dict[str, Tensor] = {}
    for name in names:
        posterior[name] = run.predictions(name, given[name])
        if progress is not None:
            progress(name)
    foreseen = {name: run.foreseen(q) for name, q in posterior.items()}
    means = {name: float(value.mean()) for name, value in foreseen.items()}
    ahead = {name: standard_errors(run.by_item(value - foreseen[VOTES])) for name, value in foreseen.items()}
    best = max(names, key=lambda name: means[name])
    if best != VOTES and ahead[best] <= margin:
        why = f"{best} foresees labels of unseen items no better than the votes do, within {margin:g} standard errors"
        best = VOTES
    elif best == VOTES:
        why = "no objective foresees labels of unseen items better than the votes do"
    else:
        why = (
            f"foresees labels of unseen items best: a mean log-probability of {means[best]:.3f} to the votes' "
            f"{means[VOTES]:.3f}, {ahead[best]:.1f} standard errors"
        )
    return Comparison(best, why, means, ahead, posterior)


@dataclass
class _Run:
    """What all objectives are compared on."""

    x: Tensor
    annotations: Annotations
    classes: int
    head: Callable[[], nn.Module]
    gold: Tensor | None
    fold: Tensor
    epochs: int
    batch_size: int
    lr: float
    objective_lr: float | None
    seed: int

    def predictions(self, name: str, options: Mapping[str, Any]) -> Tensor:
        """``[N, C]`` probabilities, each item's by the head that was trained on the other folds."""
        found = self.x.new_zeros(len(self.x), self.classes, dtype=torch.float64)
        for k in self.fold.unique().tolist():
            with torch.random.fork_rng([self.x.device] if self.x.is_cuda else []):
                torch.manual_seed(self.seed + k)
                held = self.fold == k
                found[held.to(found.device)] = self._trained(name, options, held)[held.to(found.device)]
        return found

    def objective(self, name: str, options: Mapping[str, Any]) -> Objective:
        """A new one.

        Raises:
            ValueError: unknown name, or an option that it does not have.
        """
        sizes = {"num_classes": self.classes, "num_annotators": self.annotations.num_annotators}
        if self.annotations.num_classes > self.classes:
            sizes["num_labels"] = self.annotations.num_classes
        return create(name, **sizes, **options)

    def _trained(self, name: str, options: Mapping[str, Any], held: Tensor) -> Tensor:
        kept = self.annotations.select(~held.to(self.annotations.device)[self.annotations.item])
        module = self.head().to(self.x.device)
        objective = self.objective(name, options)
        rows = kept.counts > 0
        if self.gold is not None:
            gold = self.gold.where(~held.to(self.gold.device), -1)
            objective.set_gold(gold, kept)
            rows = rows | (gold >= 0).to(rows.device)
        objective.set_feature_dim(self.x.shape[1])
        model = attach(module, objective, features=nn.Identity()).to(self.x.device)
        callback = ObjectiveCallback(model, (), kept)
        optimizer = torch.optim.Adam(param_groups(model, self.lr, objective_lr=self.objective_lr), lr=self.lr)
        items = rows.nonzero()[:, 0].cpu()

        def predict() -> tuple[Tensor, Tensor | None]:
            places = torch.arange(len(self.x), device=self.x.device)
            return predict_items(model, ((part, self.x[part]) for part in places.split(8192)), len(self.x))

        callback.begin(0, predict)
        with threads(threads_of_step(module, self.batch_size)):
            for epoch in range(self.epochs):
                callback.on_epoch_start(epoch)
                model.train()
                for batch in items[torch.randperm(len(items))].split(self.batch_size):
                    loss = model(self.x[batch.to(self.x.device)], kept[batch].to(self.x.device)).loss
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    optimizer.step()
                callback.on_epoch_end(epoch)
        return predict()[0].double().softmax(1)

    @torch.no_grad()
    def foreseen(self, posterior: Tensor) -> Tensor:
        """``[nnz]`` log-probability of each label, given its item's prediction and the labels of the other folds.

        Predictions are raised to the power that foresees best: how sharp they are depends on how long a head was
        trained, and is not what is compared.
        """
        log = posterior.to(self.annotations.device).clamp(min=1e-30).log()
        each = (self._foreseen((power * log).softmax(1)) for power in _POWERS)
        return max(each, key=lambda values: float(values.sum()))

    def _foreseen(self, posterior: Tensor) -> Tensor:
        found = posterior.new_zeros(self.annotations.num_annotations)
        for here, kept, held in self.splits:
            weight, _ = weights_of(kept, posterior.dtype)
            counts = label_counts(posterior, kept, weight=weight)
            crowd = crowd_confusion(posterior, kept, weight, kept.counts > 0)
            prior = None if crowd is None else (crowd_strength(counts, crowd) * crowd).t()
            given = log_proportions(counts, prior)[held.annotator, held.label].exp()
            found[here] = (posterior[held.item] * given).sum(1).clamp(min=1e-300).log()
        return found

    @cached_property
    def splits(self) -> list[tuple[Tensor, Annotations, Annotations]]:
        """Of each fold: which labels ``[nnz]`` are of its items, all others, and these."""
        a = self.annotations
        fold = self.fold.to(a.device)[a.item]
        return [(fold == k, a.select(fold != k), a.select(fold == k)) for k in fold.unique().tolist()]

    def by_item(self, values: Tensor) -> Tensor:
        """Sums over each item's labels, of those that have some: these depend on each other."""
        a = self.annotations
        return segment_sum(values.unsqueeze(1), a)[a.counts > 0, 0]
