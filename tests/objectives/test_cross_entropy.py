"""Class weights, label smoothing and focal terms by the book, on every objective; an error where they say nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import assert_close
from support.objectives import CASES, Case, features_of, small
from support.small_crowd import ANNOTATOR, INDPTR, LABEL, C, R, logits_of
from torch import Tensor
from torch.nn import functional as F

from crowdnal.data import Annotations
from crowdnal.objectives import (
    CMM,
    DLEM,
    LIA,
    OBJECTIVES,
    ConfusionObjective,
    CrowdLayer,
    MajorityVote,
    MaxMIG,
    Objective,
    RoundsObjective,
    SoftBootstrap,
)
from crowdnal.training import batch_shares

WEIGHT = [0.5, 2.0, 1.25]
ITEM = [i for i in range(4) for _ in range(INDPTR[i], INDPTR[i + 1])]
OPTIONS: dict[str, dict[str, Any]] = {
    "class weights": {"class_weight": WEIGHT},
    "smoothing": {"label_smoothing": 0.2},
    "focal": {"focal": 1.5},
    "all": {"class_weight": WEIGHT, "label_smoothing": 0.2, "focal": 2.0},
}
KIND = {name: case.fresh().cross_entropy_with for name, case in CASES.items()}
BY_LABEL = [name for name, kind in KIND.items() if kind == "labels"]
BY_TARGET = [name for name, kind in KIND.items() if kind == "targets" and name != "dl-em incremental"]
REDUCTIONS = ("none", "sum", "mean", "item_mean", "per_item")


def loss_of(objective: Objective, a: Annotations, reduction: str) -> Tensor:
    objective.reduction = reduction  # type: ignore[assignment]
    x = features_of(4) if objective.needs_features else None
    return objective(logits_of(4), a, x)


def terms(log_p: Tensor, target: Tensor, *, class_weight: Any = None, label_smoothing: float = 0.0, focal: float = 0.0):
    """``Σ_k c[k] t[k] (1 - p[k])^γ (-log p[k])`` of each row."""
    size = log_p.shape[1]
    target = (1 - label_smoothing) * target + label_smoothing * target.sum(1, keepdim=True) / size
    c = torch.ones(size) if class_weight is None else torch.tensor(class_weight)
    return (target * c * (1 - log_p.exp()) ** focal * -log_p).sum(1)


def plain_terms(case: Case) -> dict[str, Any]:
    """Options with which the loss is made of the labels' terms alone: neither a prior nor weights of heads beside."""
    if case.name == "weighted-doctor-net":
        return {} if "head_epochs" in case.options else {"head_epochs": 15}
    return {"confusion_prior": None} if issubclass(OBJECTIVES[case.name], ConfusionObjective) else {}


def log_probs(case: Case) -> Tensor:
    """``[nnz, K]`` as the loss sees them: of the same annotations with every label in turn."""
    objective = case.begun(**plain_terms(case))
    found = []
    for k in range(C):
        a = Annotations(INDPTR, ANNOTATOR, [k] * len(LABEL), num_annotators=R, num_classes=C)
        found.append(-loss_of(objective, a, "none").detach())
    return torch.stack(found, 1)


@pytest.mark.parametrize("what", OPTIONS)
@pytest.mark.parametrize("name", BY_LABEL)
def test_terms_of_labels(name: str, what: str) -> None:
    case, options, a = CASES[name], OPTIONS[what], small(weighted=True)
    apart = plain_terms(case)
    plain, shaped, given = case.begun(**apart), case.begun(**options, **apart), small(weighted=True).weight
    assert given is not None
    y = torch.tensor(LABEL)
    found = given * terms(log_probs(case), F.one_hot(y, C).double(), **options)
    units = given * torch.tensor(options.get("class_weight", [1.0] * C), dtype=torch.float64)[y]
    rows = [torch.tensor(ITEM) == i for i in (0, 2, 3)]
    wanted = {
        "none": found,
        "sum": found.sum(),
        "mean": found.sum() / units.sum(),
        "item_mean": sum(found[row].sum() / units[row].sum() for row in rows) / 3,
        "per_item": found.sum() / 3,
    }
    ordinary = given * -log_probs(case).gather(1, y[:, None])[:, 0]
    beside = loss_of(plain, a, "sum") - ordinary.sum()  # a penalty, or the volume of the predictions
    for reduction in REDUCTIONS:
        assert_close(
            loss_of(shaped, a, reduction), wanted[reduction] + (0 if reduction == "none" else beside), where=reduction
        )
    assert float(shaped.units(a)) == 3  # of per_item
    shaped.reduction = "mean"
    assert_close(shaped.units(a).double(), units.sum())
    x = features_of(4) if plain.needs_features else None
    for method in ("log_likelihood", "posterior"):  # of the model, whatever a label counts
        assert torch.equal(getattr(shaped, method)(logits_of(4), a, x), getattr(plain, method)(logits_of(4), a, x))


@pytest.mark.parametrize("what", OPTIONS)
@pytest.mark.parametrize("name", BY_TARGET)
def test_terms_of_targets(name: str, what: str) -> None:
    case, options, a = CASES[name], OPTIONS[what], small(weighted=True)
    objective = case.begun(**options)
    targets = objective._rows(a) if isinstance(objective, RoundsObjective) else objective.targets(a, torch.float64)
    targets = targets.where((a.counts > 0).unsqueeze(1), 0.0)
    c = torch.tensor(options.get("class_weight", [1.0] * C), dtype=torch.float64)
    units = (targets * c).sum(1) / targets.sum(1).clamp(min=1e-9)
    log_p = logits_of(4).log_softmax(1)
    if isinstance(objective, SoftBootstrap):
        smooth = options.get("label_smoothing", 0.0)
        vote = ((1 - smooth) * targets + smooth / C * targets.sum(1, keepdim=True)) * c
        whole = objective.beta * vote + (1 - objective.beta) * units[:, None] * log_p.exp()
        found = terms(log_p, whole, focal=options.get("focal", 0.0))
    else:
        found = terms(log_p, targets, **options)
    for reduction in REDUCTIONS:
        wanted = {"none": found, "sum": found.sum()}.get(reduction, found.sum() / units.sum())
        assert_close(loss_of(objective, a, reduction), wanted, where=reduction)
    assert_close(objective.units(a).double(), units.sum())


def test_online_em() -> None:
    objective = CASES["dl-em incremental"].begun(label_smoothing=0.2, focal=2.0)
    a, logits = small(), logits_of(4)
    targets = objective.posterior(logits, a).where((a.counts > 0).unsqueeze(1), 0.0)
    found = terms(logits.log_softmax(1), targets, label_smoothing=0.2, focal=2.0).sum() / 3
    assert_close(loss_of(objective, a, "mean"), found)
    with pytest.raises(ValueError, match="class_weight needs targets that are known before the batch"):
        DLEM(C, R, incremental=True, class_weight=WEIGHT)


def test_as_torch_does() -> None:
    """With class weights and smoothing, mean and sum: the softmax of each label's scores, and a majority vote."""
    options = {"weight": torch.tensor(WEIGHT, dtype=torch.float64), "label_smoothing": 0.2}
    a, logits, y = small(), logits_of(4), torch.tensor(LABEL)
    crowd = CASES["crowd-layer"].begun(class_weight=WEIGHT, label_smoothing=0.2, confusion_prior=None)
    h = torch.stack([logits[i].softmax(0) @ crowd.annotators.weight[r] for i, r in zip(ITEM, ANNOTATOR, strict=True)])
    assert_close(crowd(logits, a), F.cross_entropy(h, y, **options))
    vote = MajorityVote(C, R, class_weight=torch.tensor(WEIGHT), label_smoothing=0.2)
    winner = torch.tensor([0, -100, 2, 0])
    assert_close(vote(logits, a), F.cross_entropy(logits, winner, **options))


@pytest.mark.parametrize("name", [name for name, kind in KIND.items() if kind and name != "dl-em incremental"])
def test_gradients(name: str) -> None:
    """Of weights, smoothing, focal terms and an item without labels at once; twice the upstream gives twice as much."""
    # else its weights follow the heads, which have no gradient of that
    apart = {"head_epochs": 15} if name == "weighted-doctor-net" else {}
    objective, a = CASES[name].begun(**OPTIONS["all"], **apart), small(weighted=True)
    x = features_of(4) if objective.needs_features else None
    logits = logits_of(4).requires_grad_()
    trained = [p for p in objective.parameters() if p.requires_grad]
    sparse = "sparse_grad" in CASES[name].options
    if name == "weighted-doctor-net averaging":  # the heads are kept as they are
        trained = [objective.averaging]
    if not sparse:
        assert torch.autograd.gradcheck(lambda z, *_: objective(z, a, x), (logits, *trained), fast_mode=True)
    once, twice = (
        torch.autograd.grad(s * objective(logits, a, x), [logits, *trained], allow_unused=True) for s in (1.0, 2.0)
    )
    assert all(g is None or torch.allclose(2 * g.to_dense(), h.to_dense()) for g, h in zip(once, twice, strict=True))
    if sparse:
        assert any(g is not None and g.is_sparse for g in once[1:])
    missing = once[0]
    assert missing is None or not missing[1].any()


def test_what_a_certain_label_adds_is_smooth() -> None:
    """p = 1 in float32: no NaN from the slope of (1 - p)^γ."""
    logits = torch.tensor([[200.0, 0.0, 0.0]]).requires_grad_()
    for objective in (MajorityVote(C, 1, focal=0.5), CASES["doctor-net residual"].fresh(1, focal=0.5)):
        x = features_of(1, torch.float32) if objective.needs_features else None
        loss = objective(logits, torch.tensor([[0]]), x)
        (grad,) = torch.autograd.grad(loss, logits)
        assert loss.item() == 0 and not grad.any()


def test_a_class_that_counts_nothing() -> None:
    weight = [0.0, 1.0, 1.0]
    a = small()
    kept = a.select(a.label != 0)
    objective, plain = CrowdLayer(C, R, class_weight=weight, label_smoothing=0.1), CrowdLayer(C, R, label_smoothing=0.1)
    objective.reduction = plain.reduction = "item_mean"
    h = logits_of(4)
    assert_close(objective.units(a), plain.units(kept))
    objective.label_smoothing = plain.label_smoothing = 0.0
    assert_close(objective(h, a), plain(h, kept))
    none = MajorityVote(C, 1, class_weight=weight)(h[:1], torch.tensor([[0]]))
    assert none.item() == 0


@pytest.mark.parametrize("make", [CrowdLayer, MajorityVote])
def test_known_classes_have_their_class_weight(make: type[Objective]) -> None:
    objective, plain = (make(C, R, class_weight=WEIGHT, label_smoothing=0.2) for _ in range(2))
    gold = torch.tensor([-1, 2, 0, -1])
    objective.set_gold(gold, weight=3.0)
    a, logits, c = small(), logits_of(4).float(), torch.tensor(WEIGHT)
    own = 3 * F.cross_entropy(logits, gold, c, ignore_index=-1, reduction="sum")  # not smoothed
    units = plain.units(a)
    assert_close(objective(logits, a), (plain(logits, a) * units + own) / (units + 3 * (c[2] + c[0])))
    assert_close(objective.units(a), units + 3 * (c[2] + c[0]))


@pytest.mark.parametrize("name", ["crowd-layer", "dl-em", "majority-vote"])
def test_parts_of_a_step_are_exact(name: str) -> None:
    objective, a, logits = CASES[name].begun(**OPTIONS["all"]), small(), logits_of(4)
    parts = [torch.tensor([3, 1]), torch.tensor([0]), torch.tensor([2])]
    shares = batch_shares(objective, [a[rows] for rows in parts])
    total = sum(share * objective(logits[rows], a[rows]) for rows, share in zip(parts, shares, strict=True))
    penalty = objective.penalty(a)
    assert penalty is None
    assert_close(total, objective(logits, a), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["crowd-layer", "majority-vote"])
def test_compiled(name: str) -> None:
    objective, a = CASES[name].begun(dtype=torch.float32, **OPTIONS["all"]), small().prepare()
    logits = logits_of(4, torch.float32).requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(objective, fullgraph=True, backend="aot_eager")
    losses = compiled(logits, a), objective(logits, a)
    assert_close(*losses)
    assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in losses))


def test_wrong_options_say_so() -> None:
    for make in (MaxMIG, LIA):
        for option in OPTIONS["all"].items():
            with pytest.raises(ValueError, match=rf"{option[0]} has no meaning for {make.__name__}.*weight="):
                make(C, R, **dict([option]))
    for wrong, message in (
        ([1.0, 2.0], r"shape \[2\].*num_labels=3"),
        ([1.0, -1.0, 1.0], r"class_weight\[1\]=-1 must be finite and 0 or more"),
        ([0.0, 0.0, 0.0], "one of them above 0"),
        ([1.0, float("nan"), 1.0], r"class_weight\[1\]=nan"),
        ("high", "must be numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            CrowdLayer(C, R, class_weight=wrong)
    with pytest.raises(ValueError, match=r"shape \[4\].*num_classes=3"):
        MajorityVote(C, R, num_labels=4, class_weight=[1.0] * 4)
    with pytest.raises(ValueError, match=r"label_smoothing=1.0 must be at least 0 and below 1"):
        CrowdLayer(C, R, label_smoothing=1.0)
    with pytest.raises(ValueError, match=r"focal=-1.0"):
        MajorityVote(C, R, focal=-1.0)
    assert len(CMM(C, R, num_labels=4, class_weight=[1.0] * 4).class_weight) == 4  # type: ignore[arg-type]


def test_the_state_does_not_have_them() -> None:
    objective = CrowdLayer(C, R, class_weight=WEIGHT)
    assert "class_weight" not in objective.state_dict()
    objective.load_state_dict(CrowdLayer(C, R).state_dict())
    assert objective.double().class_weight.dtype == torch.float64
