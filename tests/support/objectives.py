"""Every objective as the tests make it: those registered, with what they need, and variants of their options.

A newly registered objective is found here by itself. `NEEDS` says what one needs beyond its defaults to be tested on
four items and four annotators; `VARIANTS` is where further options are put under the contract.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from crowdnal.data import Annotations
from crowdnal.objectives import OBJECTIVES, Objective
from support.small_crowd import C, R, batch, logits_of, perturbed

D = 5
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """An objective with options, in the epoch in which it is tested.

    Values of options that are functions are called with (annotators, items): they depend on the size of the crowd.
    """

    name: str
    options: Options = field(default_factory=dict)
    epoch: int = 1
    training: bool = True  # else a step, then .eval(): where a step in training changes what the next one gives

    def fresh(self, annotators: int = R, items: int = 4, **options: Any) -> Objective:
        """As constructed."""
        torch.manual_seed(0)  # the start may be random
        cls = OBJECTIVES[self.name]
        known = inspect.signature(cls).parameters
        given = {"feature_dim": D} if "feature_dim" in known else {}
        given |= {k: v(annotators, items) if callable(v) else v for k, v in self.options.items()} | options
        return cls(C, annotators, **given).train(self.training)

    def begun(
        self, a: Annotations | None = None, dtype: torch.dtype = torch.float64, shift: bool = True, **options: Any
    ) -> Objective:
        """In the epoch of the case, of a training on `a` (the small crowd), `shift`: away from any symmetric start."""
        a = small() if a is None else a
        objective = self.fresh(a.num_annotators, a.num_items, **options).to(dtype)
        given = logits_of(a.num_items, dtype), features_of(a.num_items, dtype)
        objective.on_train_start(a, lambda: given)
        for epoch in range(self.epoch + 1):
            if shift and epoch == self.epoch:
                objective = perturbed(objective, dtype)
            objective.on_epoch_start(epoch)
        if not self.training:
            objective.train()(given[0], a, given[1])
        return objective.train(self.training)


def small(weighted: bool = False) -> Annotations:
    """The small crowd as a training set: its items have numbers."""
    a = batch(weighted)
    a.item_id = torch.arange(a.num_items)
    return a


def features_of(items: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(items, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


def people(annotators: int, items: int) -> Tensor:
    return torch.randn(annotators, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def in_pairs(annotators: int, items: int) -> list[int]:
    """Annotators 0, 2, ... share a confusion, and 1, 3, ..."""
    return [r % 2 for r in range(annotators)]


def few(most: int) -> Callable[[int, int], int]:
    return lambda annotators, items: min(most, annotators)


NEEDS: dict[str, Options] = {
    "dl-wc": {"num_clusters": few(2)},
    "conal": {"embedding_dim": 4, "hidden_dim": 6},
    "lia": {"hidden_dim": 6, "num_layers": 2, "num_latents": 3, "embedding_dim": 4},
}
ITEMS: Options = {"instance": "embedding", "num_items": lambda annotators, items: items, "feature_dim": None}
VARIANTS: dict[str, Case] = {
    "crowd-layer VW": Case("crowd-layer", {"variant": "VW"}),
    "crowd-layer VB": Case("crowd-layer", {"variant": "VB"}),
    "crowd-layer VW+B": Case("crowd-layer", {"variant": "VW+B"}),
    "crowd-layer sparse": Case("crowd-layer", {"sparse_grad": True}),
    "crowd-layer-over softmax": Case("crowd-layer-over", {"hidden": "softmax"}),
    "trace softmax batch": Case("trace", {"normalization": "softmax", "scope": "batch", "trace_weight": 0.3}),
    "soft-bootstrap soft": Case("soft-bootstrap", {"soft": True, "beta": 0.6}),
    "single-confusion frobenius": Case(
        "single-confusion", {"regularizer": "frobenius", "normalization": "softmax", "penalty_weight": 0.3}
    ),
    "geocrowdnet W": Case("geocrowdnet", {"volume": "W", "volume_weight": 0.3}),
    "geocrowdnet W batch": Case(
        "geocrowdnet", {"volume": "W", "scope": "batch", "volume_weight": 0.3, "normalization": "softplus"}
    ),
    "union-net A": Case("union-net", {"variant": "A"}),
    "max-mig prior": Case("max-mig", {"class_prior": "votes", "learn_class_prior": True}),
    "doctor-net residual": Case("doctor-net", {"heads": "residual"}),
    "weighted-doctor-net averaging": Case("weighted-doctor-net", {"head_epochs": 0, "heads": "separate"}),
    # low rank
    "crowd-layer rank": Case("crowd-layer", {"rank": 2}),
    "crowd-layer-over rank": Case("crowd-layer-over", {"rank": 2}),
    "crowd-layer-over rank softmax": Case("crowd-layer-over", {"rank": 2, "hidden": "softmax"}),
    "trace rank": Case("trace", {"rank": 2}),
    "trace rank batch": Case("trace", {"rank": 1, "scope": "batch", "trace_weight": 0.3}),
    "geocrowdnet rank": Case("geocrowdnet", {"rank": 3, "volume_weight": 0.1}),
    "geocrowdnet rank W": Case("geocrowdnet", {"rank": 2, "volume": "W", "volume_weight": 0.3}),
    "geocrowdnet rank W batch": Case(
        "geocrowdnet", {"rank": 2, "volume": "W", "volume_weight": 0.3, "scope": "batch"}
    ),
    "single-confusion rank": Case("single-confusion", {"rank": 2, "regularizer": "frobenius"}),
    # groups
    "crowd-layer groups": Case("crowd-layer", {"groups": in_pairs}),
    "crowd-layer groups rank": Case("crowd-layer", {"groups": in_pairs, "rank": 2}),
    "crowd-layer groups VW+B": Case("crowd-layer", {"groups": in_pairs, "variant": "VW+B"}),
    "crowd-layer-over groups": Case("crowd-layer-over", {"groups": in_pairs}),
    "crowd-layer-over groups rank softmax": Case(
        "crowd-layer-over", {"groups": in_pairs, "hidden": "softmax", "rank": 2}
    ),
    "trace groups": Case("trace", {"groups": in_pairs}),
    "trace groups rank batch": Case("trace", {"groups": in_pairs, "scope": "batch", "rank": 2}),
    "geocrowdnet groups W": Case("geocrowdnet", {"groups": in_pairs, "volume": "W"}),
    "geocrowdnet groups rank W": Case("geocrowdnet", {"groups": in_pairs, "volume": "W", "rank": 2}),
    # CoNAL
    "conal probabilities": Case("conal", {**NEEDS["conal"], "mixing": "probabilities"}),
    "conal items not normalised": Case(
        "conal", {**NEEDS["conal"], "normalize_items": False, "separation_weight": 0.3}
    ),
    "conal batch": Case(
        "conal", {**NEEDS["conal"], "scope": "batch", "separation_weight": 0.3, "mixing": "probabilities"}
    ),
    "conal one layer": Case("conal", {**NEEDS["conal"], "hidden_dim": None, "separation_weight": 0.3}),
    "conal people": Case("conal", {**NEEDS["conal"], "annotator_features": people, "separation_weight": 0.0}),
    "conal sparse": Case(
        "conal", {**NEEDS["conal"], "sparse_grad": True, "scope": "batch", "separation_weight": 0.3}
    ),
    "conal sparse people": Case(
        "conal",
        {**NEEDS["conal"], "sparse_grad": True, "scope": "batch", "mixing": "probabilities",
         "annotator_features": people},
    ),
    "conal-em annotation": Case("conal-em", {"omega": "annotation"}),
    # LIA: rounds, and each way of marginalising
    "lia item": Case("lia", {**NEEDS["lia"], "rounds": 0}),
    "lia annotation": Case("lia", {**NEEDS["lia"], "rounds": 0, "finetune": "annotation"}),
    "lia embedding": Case("lia", {**NEEDS["lia"], **ITEMS, "rounds": 0}),
    "lia embedding annotation": Case("lia", {**NEEDS["lia"], **ITEMS, "rounds": 0, "finetune": "annotation"}),
    "lia people": Case("lia", {**NEEDS["lia"], "annotator_features": people, "num_latents": 1, "competence_layers": 1}),
    # CMM
    "cmm global": Case("cmm", {"setting": "global"}),
    "cmm annotators": Case("cmm", {"grouped": "annotators", "num_groups": few(2)}),
    "cmm gradient": Case("cmm", {"training": "gradient"}),
    "cmm gradient global": Case("cmm", {"training": "gradient", "setting": "global", "num_groups": 2}),
    "cmm gradient one group": Case("cmm", {"training": "gradient", "num_groups": 1}),
    "cmm gradient gate": Case("cmm", {"training": "gradient", "gate": "features"}),
    # EM
    "dl-em incremental": Case("dl-em", {"incremental": True}, training=False),
    "dl-ds hard one-coin": Case("dl-ds", {"soft": False, "one_coin": True}),
    "dl-aggregate one-coin": Case("dl-aggregate", {"method": "one-coin"}),
}  # fmt: skip
CASES: dict[str, Case] = {name: Case(name, NEEDS.get(name, {})) for name in OBJECTIVES} | VARIANTS
