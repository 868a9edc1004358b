"""Four items, four annotators, three classes, every objective, and each loss written out by the book."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from crowdnal.data import Annotations
from crowdnal.objectives import CrowdLayer, MajorityVote, Objective, SoftMajorityVote, TraceRegularized

C, R = 3, 4
VARIANTS = ("MW", "VW", "VB", "VW+B")
MAKERS = {
    "majority-vote": MajorityVote,
    "soft-majority-vote": SoftMajorityVote,
    **{f"crowd-layer {v}": partial(CrowdLayer, variant=v) for v in VARIANTS},
    "trace": TraceRegularized,
    "trace softmax batch": partial(TraceRegularized, normalization="softmax", scope="batch", trace_weight=0.3),
}
CROWD = [name for name in MAKERS if "vote" not in name]
# item 1 has no label, annotator 2 labels item 2 twice, annotator 3 labels nothing
INDPTR, ANNOTATOR, LABEL = [0, 2, 2, 5, 6], [0, 2, 2, 1, 2, 1], [1, 0, 2, 2, 1, 0]


def batch(weighted: bool = False) -> Annotations:
    weight = torch.tensor([0.5, 2.0, 1.0, 0.0, 1.5, 3.0], dtype=torch.float64) if weighted else None
    return Annotations(INDPTR, ANNOTATOR, LABEL, num_annotators=R, num_classes=C, weight=weight)


def logits_of(size: int = 4, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (scale * torch.randn(size, C, generator=generator, dtype=torch.float64)).to(dtype)


def perturbed(objective: Objective, dtype: torch.dtype = torch.float64) -> Objective:
    """Parameters away from their symmetric start."""
    generator = torch.Generator().manual_seed(1)
    objective = objective.to(dtype)
    with torch.no_grad():
        for p in objective.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype) * 0.5)
    return objective


def plain_terms(objective: Objective, logits: Tensor) -> tuple[list[Tensor], Tensor | float]:
    """NLL of each annotation and the penalty, one annotation at a time, by the book."""
    p = torch.softmax(logits, 1)
    terms = []
    item = [i for i in range(4) for _ in range(INDPTR[i], INDPTR[i + 1])]
    parameters = dict(objective.named_parameters())
    penalty: Tensor | float = 0.0
    if isinstance(objective, CrowdLayer):
        for i, r, y in zip(item, ANNOTATOR, LABEL, strict=True):
            if objective.variant == "MW":
                h = p[i] @ parameters["annotators.weight"][r]
            else:
                h = p[i]
                if "annotators.scale" in parameters:
                    h = h * parameters["annotators.scale"][r]
                if "annotators.bias" in parameters:
                    h = h + parameters["annotators.bias"][r]
            terms.append(-torch.log(torch.exp(h[y]) / torch.exp(h).sum()))
    else:
        assert isinstance(objective, TraceRegularized)
        rho = parameters["annotators.weight"]
        positive = torch.log1p(rho.exp()) if objective.annotators.normalization == "softplus" else rho.exp()
        matrices = (positive / positive.sum(1, keepdim=True)).transpose(1, 2)  # [R, true, observed]
        for i, r, y in zip(item, ANNOTATOR, LABEL, strict=True):
            terms.append(-torch.log(p[i] @ matrices[r][:, y]))
        chosen = range(R) if objective.scope == "all" else sorted(set(ANNOTATOR))
        penalty = objective.trace_weight * sum(torch.trace(matrices[r]) for r in chosen) / len(chosen)
    return terms, penalty


def plain_loss(objective: Objective, logits: Tensor, weight: list[float]) -> Tensor:
    if isinstance(objective, MajorityVote):
        votes = torch.zeros(4, C, dtype=logits.dtype)
        for n, (r, y) in enumerate(zip(ANNOTATOR, LABEL, strict=True)):
            del r
            votes[[i for i in range(4) if INDPTR[i] <= n < INDPTR[i + 1]][0], y] += weight[n]
        losses = torch.stack(
            [
                F.cross_entropy(logits[i], votes[i] / votes[i].sum() if objective.soft else votes[i].argmax())
                if votes[i].sum() > 0
                else logits.new_zeros(())
                for i in range(4)
            ]
        )
        reduced = {"none": losses, "sum": losses.sum()}
        return reduced.get(objective.reduction, losses.sum() / 3)
    terms, penalty = plain_terms(objective, logits)
    weighted = torch.stack([w * t for w, t in zip(weight, terms, strict=True)])
    if objective.reduction == "none":
        return weighted
    if objective.reduction == "sum":
        return weighted.sum() + penalty
    if objective.reduction == "mean":
        return weighted.sum() / sum(weight) + penalty
    if objective.reduction == "per_item":
        return weighted.sum() / 3 + penalty
    spans = [(INDPTR[i], INDPTR[i + 1]) for i in (0, 2, 3)]
    return sum(weighted[a:b].sum() / sum(weight[a:b]) for a, b in spans) / 3 + penalty
