"""Low-rank confusions: who takes a rank, by the book, small in memory, and better where data are few."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from support import attached
from support.compare import assert_close
from support.low_rank import RANK, dense_scores
from support.memory import Largest
from support.problems import make_problem
from support.small_crowd import C, R, batch, perturbed
from torch import Tensor

from crowdnal import metrics
from crowdnal.confusion import FreeConfusion, LowRankConfusion, LowRankMixture, NormalizedConfusion, StackedConfusion
from crowdnal.data import Annotations
from crowdnal.objectives import (
    OBJECTIVES,
    ConfusionObjective,
    CrowdLayer,
    GeoCrowdNet,
    Objective,
    OverparametrizedCrowdLayer,
    SoftmaxObjective,
    TraceRegularized,
)
from crowdnal.train import InputError
from crowdnal.train.options import parse_options
from crowdnal.training import attach

# Low rank


def dense_mixture(m: LowRankMixture) -> Tensor:
    """A [R, C, K], one cell at a time."""
    a, s, b = torch.sigmoid(m.diagonal), torch.softmax(m.choice, 1), torch.softmax(m.profile, 2)
    (annotators, rank, classes), labels = s.shape, b.shape[2]

    def cell(r: int, k: int, y: int) -> Tensor:
        named = a[r, k] if k < a.shape[1] else torch.zeros((), dtype=a.dtype)
        return named * float(y == k) + (1 - named) * sum(s[r, i, k] * b[r, i, y] for i in range(rank))

    rows = [torch.stack([cell(r, k, y) for y in range(labels)]) for r in range(annotators) for k in range(classes)]
    return torch.stack(rows).view(annotators, classes, labels)


def dense(low: LowRankConfusion | LowRankMixture | StackedConfusion) -> Tensor:
    """The confusion of a classifier that is certain, [R, C, K]."""
    if isinstance(low, LowRankMixture):
        return dense_mixture(low)
    if isinstance(low, LowRankConfusion):
        return dense_scores(low).softmax(-1)
    hidden = dense_scores(low.first)
    hidden = hidden.softmax(-1) if low.hidden == "softmax" else hidden
    return torch.einsum("rcd,rdk->rck", hidden, dense_scores(low.second)).softmax(-1)


def term_by_term(objective: Objective, logits: Tensor, annotations: Annotations) -> Tensor:
    p, low = torch.softmax(logits, 1), objective.annotators
    rows = zip(annotations.item.tolist(), annotations.annotator.tolist(), annotations.label.tolist(), strict=True)
    if isinstance(low, LowRankMixture):
        matrices = dense_mixture(low)
        return torch.stack([-torch.log(p[i] @ matrices[r][:, y]) for i, r, y in rows])
    if isinstance(low, LowRankConfusion):
        matrices = dense_scores(low)
        return torch.stack([-torch.log_softmax(p[i] @ matrices[r], 0)[y] for i, r, y in rows])
    first, second = dense_scores(low.first), dense_scores(low.second)
    terms = []
    for i, r, y in rows:
        h = p[i] @ first[r]
        h = torch.softmax(h, 0) if low.hidden == "softmax" else h
        terms.append(-torch.log_softmax(h @ second[r], 0)[y])
    return torch.stack(terms)


LINKS = {
    "scores": CrowdLayer,
    "probabilities": TraceRegularized,
    "two": OverparametrizedCrowdLayer,
    "two softmax": partial(OverparametrizedCrowdLayer, hidden="softmax"),
}


@pytest.mark.parametrize(("classes", "labels"), [(4, 4), (5, 3), (3, 5), (1, 1)])
@pytest.mark.parametrize("link", LINKS)
def test_loss_gradients_and_what_is_shown_equal_the_dense_matrix(link, classes, labels):
    p = make_problem(5, 6, classes, labels, 4, seed=3)
    objective = perturbed(LINKS[link](classes, 6, num_labels=labels, rank=min(2, classes, labels), reduction="none"))
    inputs = [p.scores.requires_grad_(), *objective.parameters()]
    ours, book = objective(inputs[0], p.annotations), term_by_term(objective, inputs[0], p.annotations)
    assert_close(ours, book)
    upstream = p.weight
    grads = (torch.autograd.grad(x, inputs, upstream, materialize_grads=True) for x in (ours, book))
    assert_close(*map(list, grads))
    low, a = objective.annotators, p.annotations
    shown = dense(low).detach()
    assert_close(objective.confusion(), shown)
    assert_close(low.diagonals(), shown.diagonal(dim1=1, dim2=2))
    assert_close(objective.reliability(), metrics.reliability(shown))
    assert_close(low.log_likelihoods(a).exp(), shown[a.annotator, :, a.label])


@pytest.mark.parametrize(("classes", "labels"), [(4, 4), (5, 3), (3, 5), (1, 1)])
def test_sums_over_the_cells_of_a_mixture(classes, labels):
    low = perturbed(LowRankMixture(6, classes, labels, rank=min(2, classes, labels)))
    dense, some, share = dense_mixture(low), torch.tensor([4, 1]), torch.rand(6, dtype=torch.float64)
    full = NormalizedConfusion(6, classes, labels, normalization="softmax").double()
    with torch.no_grad():
        full.weight.copy_(dense.transpose(1, 2).log())
    sums = {
        "traces": (low.traces(), full.traces(), dense.diagonal(dim1=1, dim2=2).sum(-1)),
        "of some": (low.traces(some), full.traces(some), dense[some].diagonal(dim1=1, dim2=2).sum(-1)),
        "square_norms": (low.square_norms(), full.square_norms(), dense.square().sum((1, 2))),
        "gram": (low.gram(share), full.gram(share), torch.einsum("r,rck,rdk->cd", share, dense, dense)),
        "gram of some": (
            low.gram(share[:2], some),
            full.gram(share[:2], some),
            dense[4] @ dense[4].T * share[0] + dense[1] @ dense[1].T * share[1],
        ),
    }
    for what, (ours, of_full, book) in sums.items():
        assert_close(ours, book, where=what)
        assert_close(of_full, book)
        upstream = torch.randn_like(book)
        grads = (
            torch.autograd.grad(x, list(low.parameters()), upstream, retain_graph=True, materialize_grads=True)
            for x in (ours, book)
        )
        assert_close(*grads, where=what)


@pytest.mark.parametrize("scope", ["all", "batch"])
def test_volume_of_low_rank_confusions(scope):
    """Annotators 0, 2 and 3 share a matrix; 0, 1 and 2 label."""
    objective = perturbed(GeoCrowdNet(C, R, volume="W", volume_weight=0.5, scope=scope, rank=2, groups=[0, 1, 0, 0]))
    everyone = dense_mixture(objective.annotators)[[0, 1, 0, 0]][: R if scope == "all" else 3]
    volume = torch.logdet(torch.einsum("rck,rdk->cd", everyone, everyone) / len(everyone))
    assert_close(objective.penalty(batch()), -0.5 * volume, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("link", LINKS)
def test_blocks_of_annotators_change_nothing(link, monkeypatch):
    p = make_problem(8, 6, 4, 3, 3, seed=5)
    objective = perturbed(LINKS[link](4, 6, num_labels=3, rank=2))
    whole = objective.posterior(p.scores, p.annotations), objective.reliability()
    monkeypatch.setattr("crowdnal.confusion.low_rank.CELLS", 4 * 4 * 2)
    assert_close((objective.posterior(p.scores, p.annotations), objective.reliability()), whole)


@pytest.mark.parametrize("link", LINKS)
def test_derivatives_of_second_order(link):
    p = make_problem(2, 2, 3, 4, 2, seed=1)
    objective = perturbed(LINKS[link](3, 2, num_labels=4, rank=1))
    names = [name for name, _ in objective.named_parameters()]

    def loss(logits: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(objective, given, (logits, p.annotations))

    inputs = [p.scores.requires_grad_(), *(q.detach().clone().requires_grad_() for q in objective.parameters())]
    assert torch.autograd.gradcheck(loss, inputs) and torch.autograd.gradgradcheck(loss, inputs)


@pytest.mark.parametrize("link", ["scores", "two", "two softmax"])
def test_start_of_the_softmax_link_is_the_identity(link):
    low, full = LINKS[link](5, 3, num_labels=4, rank=2), LINKS[link](5, 3, num_labels=4)
    assert_close(low.confusion(), full.confusion())
    logits = torch.randn(3, 5)
    some = Annotations([0, 2, 3, 3], [0, 1, 2], [1, 3, 0], num_annotators=3, num_classes=4)
    assert_close(low(logits, some), full(logits, some))
    low(logits, some).backward()
    for name, p in low.named_parameters():  # U has none as long as V is 0
        assert (p.grad.abs().sum() > 0) == (not name.endswith("left")), name


def test_start_of_the_mixture_is_near_the_identity_and_habits_part():
    torch.manual_seed(0)
    objective = TraceRegularized(4, 3, rank=2)
    a = torch.tensor(3.0).sigmoid()
    start = (a * torch.eye(4) + (1 - a) / 4).expand(3, 4, 4)
    assert_close(objective.confusion(), start, rtol=0.3, atol=0)
    some = Annotations([0, 2, 3], [0, 1, 2], [1, 3, 0], num_annotators=3, num_classes=4)
    objective(torch.randn(2, 4), some).backward()
    profile, choice = objective.annotators.profile.grad, objective.annotators.choice.grad
    assert ((profile[:, 0] - profile[:, 1]).abs().amax(1) > 1e-6).all() and (choice.abs().amax((1, 2)) > 1e-6).all()


@pytest.mark.parametrize("name", RANK)
def test_extremes_stay_finite(name):
    objective = RANK[name](C, R)
    with torch.no_grad():
        for p in objective.annotators.parameters():
            p.copy_(torch.where(torch.rand_like(p) < 0.5, -300.0, 300.0))
    logits = (1e3 * torch.eye(C))[[0, 1, 2, 0]].requires_grad_()
    loss = objective(logits, batch())
    loss.backward()
    assert loss.isfinite() and logits.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in objective.parameters())
    assert objective.posterior(logits.detach(), batch()).isfinite().all()


@pytest.mark.parametrize("name", [name for name in RANK if name != "single-confusion"])
def test_no_matrix_is_built(name):
    """40 classes, 50 annotators: 80,000 cells of matrices against 3,600 scores."""
    classes, items = 40, 30
    labels = torch.randint(0, classes, (items * 3,)).tolist()
    who = torch.randint(0, 50, (items * 3,)).tolist()
    some = Annotations([3 * i for i in range(items + 1)], who, labels, num_annotators=50, num_classes=classes)
    objective = RANK[name](classes, 50)
    logits = torch.randn(items, classes, requires_grad=True)
    with Largest() as largest:
        objective(logits, some).backward()
    assert largest.elements <= max(len(who), 50) * classes * objective.rank  # scores or parameters


def test_a_thousand_classes_and_thousands_of_annotators():
    """Full matrices would be 8 GB, two of them 16."""
    some = Annotations([0, 2, 4], [3, 1_999, 17, 3], [999, 5, 0, 5], num_annotators=2_000, num_classes=1000).prepare()
    logits = torch.randn(2, 1000, requires_grad=True)
    for cls, kwargs in (
        (CrowdLayer, {}), (OverparametrizedCrowdLayer, {}), (TraceRegularized, {"scope": "batch"}),
        (GeoCrowdNet, {"scope": "batch", "volume": "W"}),
    ):  # fmt: skip
        objective = cls(1000, 2_000, rank=1, **kwargs)
        optimizer = torch.optim.SGD(objective.parameters(), lr=1.0)
        before = [p.detach().clone() for p in objective.parameters()]
        with Largest() as largest:
            objective(logits, some).backward()
            optimizer.step()
        assert largest.elements <= 2_000 * 1000  # a vector an annotator
        for p, start in zip(objective.parameters(), before, strict=True):
            moved = (p != start).flatten(1).any(1).nonzero().squeeze(1).tolist()
            assert moved in ([3, 17, 1_999], []), cls  # nothing: U as long as V is 0
        assert objective.posterior(logits.detach(), some).sum(1).tolist() == pytest.approx([1, 1], abs=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(OverparametrizedCrowdLayer, rank=4), "rank=4 must be 1"),
        (partial(CrowdLayer, rank=0), r"rank=0 must be 1 to min\(num_classes, num_labels\)=3"),
        (partial(TraceRegularized, rank=4), "rank=4 must be 1"),
        (partial(GeoCrowdNet, rank=1.5), "rank=1.5"),
        (partial(CrowdLayer, rank=1, variant="VW"), "rank=1 is for variant='MW'"),
        (partial(CrowdLayer, rank=1, sparse_grad=True), "sparse_grad=True"),
        (partial(TraceRegularized, rank=1, sparse_grad=True, scope="batch"), "sparse_grad=True"),
        (partial(CrowdLayer, groups=[0, 1]), r"groups is torch.int64 \[2\].*num_annotators=4"),
        (partial(TraceRegularized, groups=[0.0, 1, 2, 0]), "groups is torch.float32"),
        (partial(CrowdLayer, groups=torch.tensor([0, 1, -1, 0])), r"groups\[2\]=-1 must be 0 or more"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make(C, R)


def test_every_objective_with_softmax_or_mixture_link_takes_a_rank():
    """The others have no trained matrices (closed forms, heads), few (CMM), or another link."""
    for cls in OBJECTIVES.values():
        assert ("rank" in inspect.signature(cls).parameters) == issubclass(cls, ConfusionObjective), cls
    with_rank = {name for name, cls in OBJECTIVES.items() if issubclass(cls, ConfusionObjective)}
    assert with_rank >= {"crowd-layer", "crowd-layer-over", "conal", "trace", "single-confusion", "geocrowdnet"}
    for name in with_rank:
        options = parse_options(OBJECTIVES[name], ("rank=2",))
        kinds = {type(m) for m in OBJECTIVES[name](5, 4, **options).modules()}
        assert (LowRankConfusion if issubclass(OBJECTIVES[name], SoftmaxObjective) else LowRankMixture) in kinds
        assert not kinds & {FreeConfusion, NormalizedConfusion}


def test_options_of_the_command_line():
    assert parse_options(TraceRegularized, ("rank=none",)) == {"rank": None}
    with pytest.raises(InputError, match="'groups' is unknown to crowd-layer: it takes.* rank"):
        parse_options(CrowdLayer, ("groups=1",))


# Systems


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "make",
    [
        partial(GeoCrowdNet, volume="F"),
        partial(GeoCrowdNet, volume="W", scope="batch"),
        partial(TraceRegularized, rank=2, scope="batch", groups=[0, 1, 0, 2, 2, 1]),
        partial(OverparametrizedCrowdLayer, rank=2),
    ],
    ids=["F", "W", "trace", "over"],
)
def test_torch_func_and_compile(make):
    attached.check_functional_call(attach(attached.mlp(), make(attached.C, attached.R)))
    attached.check_compiled(attach(attached.mlp(), make(attached.C, attached.R)))
