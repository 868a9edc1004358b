"""Low-rank confusions and confusions that groups share: by the book, small in memory, and better where data are few."""

from __future__ import annotations

from functools import partial

import contract
import pytest
import test_systems
import torch
from problems import make_problem
from small_crowd import C, R, batch, logits_of, perturbed
from test_methods import Largest, annotate, blobs, fit, planted
from torch import Tensor, nn

from crowdnal.annotations import Annotations
from crowdnal.low_rank import LowRankConfusion, LowRankMixture
from crowdnal.objectives import CrowdLayer, GeoCrowdNet, MajorityVote, SingleConfusion, TraceRegularized
from crowdnal.train.config import InputError, parse_options

RANK = {
    "crowd-layer": partial(CrowdLayer, rank=2),
    "trace": partial(TraceRegularized, rank=2),
    "trace batch": partial(TraceRegularized, rank=1, scope="batch", trace_weight=0.3),
    "geocrowdnet": partial(GeoCrowdNet, rank=3, volume_weight=0.1),
    "single-confusion": partial(SingleConfusion, rank=2, regularizer="frobenius"),
}


def in_pairs(cls, **kwargs):
    """Annotators 0, 2, ... share a confusion, and 1, 3, ..."""
    return lambda c, r, **more: cls(c, r, groups=[i % 2 for i in range(r)], **kwargs, **more)


SHARED = {
    "crowd-layer": in_pairs(CrowdLayer),
    "crowd-layer rank": in_pairs(CrowdLayer, rank=2),
    "crowd-layer VW+B": in_pairs(CrowdLayer, variant="VW+B"),
    "trace": in_pairs(TraceRegularized),
    "trace batch rank": in_pairs(TraceRegularized, scope="batch", rank=2),
    "geocrowdnet W": in_pairs(GeoCrowdNet, volume="W"),
}


@pytest.mark.parametrize("name", RANK)
def test_contract_of_low_rank(name: str) -> None:
    own = [] if name == "single-confusion" else contract.OWN_MATRICES
    contract.check(RANK, name, [*contract.EVERYONE, *contract.CONFUSIONS, *own])


@pytest.mark.parametrize("name", SHARED)
def test_contract_of_groups(name: str) -> None:
    contract.check(SHARED, name, [*contract.EVERYONE, *contract.CONFUSIONS])


# Low rank


def dense_scores(m: LowRankConfusion) -> Tensor:
    """W [R, C, K]."""
    annotators, classes, _ = m.left.shape
    w = torch.zeros(annotators, classes, m.right.shape[2], dtype=m.left.dtype)
    for k in range(m.diagonal.shape[1]):
        w[:, k, k] = 1.0
        w[:, k, k] *= m.diagonal[:, k]
    return w + torch.einsum("rcm,rmk->rck", m.left, m.right)


def dense_mixture(m: LowRankMixture) -> Tensor:
    """A [R, C, K], one cell at a time."""
    a, s, b = torch.sigmoid(m.diagonal), torch.softmax(m.choice, 1), torch.softmax(m.habit, 2)
    (annotators, rank, classes), labels = s.shape, b.shape[2]

    def cell(r: int, k: int, y: int) -> Tensor:
        named = a[r, k] if k < a.shape[1] else torch.zeros((), dtype=a.dtype)
        return named * float(y == k) + (1 - named) * sum(s[r, i, k] * b[r, i, y] for i in range(rank))

    rows = [torch.stack([cell(r, k, y) for y in range(labels)]) for r in range(annotators) for k in range(classes)]
    return torch.stack(rows).view(annotators, classes, labels)


def term_by_term(objective, logits: Tensor, annotations: Annotations) -> Tensor:
    p = torch.softmax(logits, 1)
    low = objective.annotators
    matrices = dense_scores(low) if isinstance(low, LowRankConfusion) else dense_mixture(low)
    rows = zip(annotations.item.tolist(), annotations.annotator.tolist(), annotations.label.tolist(), strict=True)
    if isinstance(low, LowRankConfusion):
        return torch.stack([-torch.log_softmax(p[i] @ matrices[r], 0)[y] for i, r, y in rows])
    return torch.stack([-torch.log(p[i] @ matrices[r][:, y]) for i, r, y in rows])


@pytest.mark.parametrize(("classes", "labels"), [(4, 4), (5, 3), (3, 5), (1, 1)])
@pytest.mark.parametrize("cls", [CrowdLayer, TraceRegularized])
def test_loss_gradients_and_what_is_shown_equal_the_dense_matrix(cls, classes, labels):
    p = make_problem(5, 6, classes, labels, 4, seed=3)
    objective = perturbed(cls(classes, 6, num_labels=labels, rank=min(2, classes, labels), reduction="none"))
    inputs = [p.scores.requires_grad_(), *objective.parameters()]
    ours, book = objective(inputs[0], p.annotations), term_by_term(objective, inputs[0], p.annotations)
    torch.testing.assert_close(ours, book)
    upstream = p.weight
    grads = (torch.autograd.grad(x, inputs, upstream, materialize_grads=True) for x in (ours, book))
    torch.testing.assert_close(*map(list, grads))
    low = objective.annotators
    dense = (dense_scores(low).softmax(-1) if cls is CrowdLayer else dense_mixture(low)).detach()
    torch.testing.assert_close(objective.confusion(), dense)
    torch.testing.assert_close(low.diagonals(), dense.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(objective.reliability(), dense.diagonal(dim1=1, dim2=2).mean(-1))
    a = p.annotations
    torch.testing.assert_close(low.log_likelihoods(a).exp(), dense[a.annotator, :, a.label])
    if cls is TraceRegularized:
        traces = dense_mixture(low).diagonal(dim1=1, dim2=2).sum(-1)
        torch.testing.assert_close(low.traces(), traces)
        torch.testing.assert_close(low.traces(torch.tensor([4, 1])), traces[[4, 1]])
        expected = torch.autograd.grad(traces.mean(), low.diagonal)[0]
        torch.testing.assert_close(torch.autograd.grad(low.traces().mean(), low.diagonal)[0], expected)
        parts = list(low.parameters())
        squares = low.square_norms(), dense_mixture(low).square().sum((1, 2))
        torch.testing.assert_close(*squares)
        ours, book = (torch.autograd.grad(x.sum(), parts, materialize_grads=True) for x in squares)
        torch.testing.assert_close(ours, book)


@pytest.mark.parametrize("cls", [CrowdLayer, TraceRegularized])
def test_blocks_of_annotators_change_nothing(cls, monkeypatch):
    p = make_problem(8, 6, 4, 3, 3, seed=5)
    objective = perturbed(cls(4, 6, num_labels=3, rank=2))
    whole = objective.posterior(p.scores, p.annotations), objective.reliability()
    monkeypatch.setattr("crowdnal.low_rank.CELLS", 4 * 3 * 2)
    torch.testing.assert_close((objective.posterior(p.scores, p.annotations), objective.reliability()), whole)


@pytest.mark.parametrize("cls", [CrowdLayer, TraceRegularized])
def test_derivatives_of_second_order(cls):
    p = make_problem(3, 3, 3, 4, 2, seed=1)
    objective = perturbed(cls(3, 3, num_labels=4, rank=2))
    names = [name for name, _ in objective.named_parameters()]

    def loss(logits: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(objective, given, (logits, p.annotations))

    inputs = [p.scores.requires_grad_(), *(q.detach().clone().requires_grad_() for q in objective.parameters())]
    assert torch.autograd.gradcheck(loss, inputs) and torch.autograd.gradgradcheck(loss, inputs)


def test_start_of_the_softmax_link_is_the_identity():
    low = CrowdLayer(5, 3, num_labels=4, rank=2)
    full = CrowdLayer(5, 3, num_labels=4)
    torch.testing.assert_close(low.confusion(), full.confusion())
    logits = torch.randn(3, 5)
    some = Annotations([0, 2, 3, 3], [0, 1, 2], [1, 3, 0], num_annotators=3, num_classes=4)
    torch.testing.assert_close(low(logits, some), full(logits, some))
    low(logits, some).backward()
    assert low.annotators.right.grad.abs().sum() > 0 and low.annotators.diagonal.grad.abs().sum() > 0


def test_start_of_the_mixture_is_near_the_identity_and_habits_part():
    torch.manual_seed(0)
    objective = TraceRegularized(4, 3, rank=2)
    a = torch.tensor(3.0).sigmoid()
    start = (a * torch.eye(4) + (1 - a) / 4).expand(3, 4, 4)
    torch.testing.assert_close(objective.confusion(), start, rtol=0.3, atol=0)
    some = Annotations([0, 2, 3], [0, 1, 2], [1, 3, 0], num_annotators=3, num_classes=4)
    objective(torch.randn(2, 4), some).backward()
    habit, choice = objective.annotators.habit.grad, objective.annotators.choice.grad
    assert ((habit[:, 0] - habit[:, 1]).abs().amax(1) > 1e-6).all() and (choice.abs().amax((1, 2)) > 1e-6).all()


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


@pytest.mark.parametrize("name", ["crowd-layer", "trace batch", "geocrowdnet"])
def test_no_matrix_is_built(name):
    """40 classes, 50 annotators: 80,000 cells of matrices against 3,600 scores."""
    classes, items = 40, 30
    labels = torch.randint(0, classes, (items * 3,)).tolist()
    who = torch.randint(0, 50, (items * 3,)).tolist()
    some = Annotations([3 * i for i in range(items + 1)], who, labels, num_annotators=50, num_classes=classes)
    objective = RANK[name](classes, 50)
    logits = torch.randn(items, classes, requires_grad=True)
    rank = 1 if name == "trace batch" else 3
    with Largest() as largest:
        objective(logits, some).backward()
    assert largest.elements <= max(len(who), 50) * classes * rank  # scores or parameters


def test_a_thousand_classes_and_thousands_of_annotators():
    """Full matrices would be 16 GB."""
    some = Annotations([0, 2, 4], [3, 3_999, 17, 3], [999, 5, 0, 5], num_annotators=4_000, num_classes=1000)
    logits = torch.randn(2, 1000, requires_grad=True)
    for cls, kwargs in ((CrowdLayer, {}), (TraceRegularized, {"scope": "batch"})):
        objective = cls(1000, 4_000, rank=1, **kwargs)
        objective(logits, some).backward()
        assert objective.annotators.diagonal.grad[[3, 17, 3_999]].abs().amax(1).min() > 0
        assert objective.posterior(logits.detach(), some).sum(1).tolist() == pytest.approx([1, 1], abs=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
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


def test_options_of_the_command_line():
    assert parse_options(CrowdLayer, ("rank=2",)) == {"rank": 2}
    assert parse_options(TraceRegularized, ("rank=none",)) == {"rank": None}
    with pytest.raises(InputError, match="'groups' is unknown to crowd-layer: it takes.* rank"):
        parse_options(CrowdLayer, ("groups=1",))


# A crowd of a few habits


def habitual(annotators: int, classes: int, seed: int = 0) -> Tensor:
    """Everyone names 40 to 90 % of each class, else gives a label from one distribution of theirs."""
    generator = torch.Generator().manual_seed(seed)
    right = 0.4 + 0.5 * torch.rand(annotators, classes, 1, generator=generator)
    habit = torch.randn(annotators, 1, classes, generator=generator).softmax(-1)
    return right * torch.eye(classes) + (1 - right) * habit


def wide_blobs(items: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centres = 2.5 * torch.randn(classes, 8, generator=torch.Generator().manual_seed(77))
    truth = torch.randint(0, classes, (items,), generator=generator)
    return centres[truth] + 0.8 * torch.randn(items, 8, generator=generator), truth


def fit_wide(objective, x: Tensor, annotations: Annotations, steps: int = 200, lr: float = 0.05) -> nn.Module:
    torch.manual_seed(0)
    classifier = nn.Linear(x.shape[1], objective.num_classes)
    optimizer = torch.optim.Adam([*classifier.parameters(), *objective.parameters()], lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        objective(classifier(x), annotations).backward()
        optimizer.step()
    return classifier


def wide_annotations(truth: Tensor, confusion: Tensor, per_item: int) -> Annotations:
    from crowdnal.simulation import simulate

    return simulate(truth, confusion, annotations_per_item=per_item, seed=4)


@pytest.mark.parametrize("name", ["crowd-layer", "trace", "geocrowdnet"])
def test_low_rank_recovers_planted_confusions_and_beats_majority_vote(name):
    x, truth = blobs()
    confusion = planted()
    annotations = annotate(truth, confusion, 5)
    torch.manual_seed(2)
    kwargs = {"volume_weight": 0.01} if name == "geocrowdnet" else {}
    objective = RANK[name](C, len(confusion), **kwargs)
    classifier, votes = (fit(o, x, annotations) for o in (objective, MajorityVote(C, len(confusion))))
    test_x, test_truth = blobs(seed=5)
    accuracy, baseline = ((c(test_x).argmax(-1) == test_truth).float().mean().item() for c in (classifier, votes))
    assert accuracy > 0.95 and accuracy > baseline + 0.2
    assert (objective.confusion() - confusion).pow(2).mean() < (0.012 if name == "crowd-layer" else 0.004)
    reliability = confusion.diagonal(dim1=1, dim2=2).mean(-1)
    assert torch.corrcoef(torch.stack([objective.reliability(), reliability]))[0, 1] > 0.97


def test_low_rank_needs_fewer_labels():
    """30 annotators, 10 classes, 60 labels each: 90 free cells for 60 labels, or 29 of a diagonal and a habit."""
    confusion = habitual(30, 10)
    x, truth = wide_blobs(600, 10)
    annotations = wide_annotations(truth, confusion, 3)
    errors = {}
    for rank in (1, None):
        torch.manual_seed(2)
        objective = TraceRegularized(10, 30, rank=rank)
        classifier = fit_wide(objective, x, annotations)
        errors[rank] = (objective.confusion() - confusion).pow(2).sum((1, 2)).mean().item() / 10
        assert (classifier(x).argmax(-1) == truth).float().mean() > 0.9
    assert errors[1] < 0.08 and errors[1] < 0.7 * errors[None]


# Groups


@pytest.mark.parametrize("name", SHARED)
def test_a_group_is_annotators_whose_matrices_are_equal(name):
    groups = torch.tensor([1, 0, 1, 2])
    make = {
        "crowd-layer": CrowdLayer,
        "crowd-layer rank": partial(CrowdLayer, rank=2),
        "crowd-layer VW+B": partial(CrowdLayer, variant="VW+B"),
        "trace": TraceRegularized,
        "trace batch rank": partial(TraceRegularized, scope="batch", rank=2),
        "geocrowdnet W": partial(GeoCrowdNet, volume="W"),
    }[name]
    for reduction in ("mean", "item_mean", "sum", "none"):
        shared = perturbed(make(C, R, groups=groups, reduction=reduction))
        own = make(C, R, reduction=reduction).double()
        given = dict(shared.named_parameters())
        with torch.no_grad():
            for key, parameter in own.named_parameters():
                assert given[key].shape[0] == 3
                parameter.copy_(given[key][groups])
        logits = logits_of().requires_grad_()
        losses = [o(logits, batch(True)) for o in (shared, own)]
        torch.testing.assert_close(*losses)
        grads = [
            torch.autograd.grad(loss.sum(), [logits, *o.parameters()], materialize_grads=True)
            for loss, o in zip(losses, (shared, own), strict=True)
        ]
        torch.testing.assert_close(grads[0][0], grads[1][0])
        for got, each in zip(grads[0][1:], grads[1][1:], strict=True):
            torch.testing.assert_close(got, torch.zeros_like(got).index_add(0, groups, each))
        torch.testing.assert_close(shared.confusion(), own.confusion())
        torch.testing.assert_close(shared.reliability(), own.reliability())
        for method in ("posterior", "log_likelihood"):
            torch.testing.assert_close(*(getattr(o, method)(logits, batch(True)) for o in (shared, own)))


def test_sparse_gradients_of_groups():
    groups = [1, 0, 1, 2]
    for make in (CrowdLayer, partial(TraceRegularized, scope="batch")):
        dense, sparse = (make(C, R, groups=groups, sparse_grad=flag) for flag in (False, True))
        for o in (dense, sparse):
            o(logits_of(dtype=torch.float32), batch()).backward()
        assert sparse.annotators.weight.grad.is_sparse
        torch.testing.assert_close(sparse.annotators.weight.grad.to_dense(), dense.annotators.weight.grad)


def test_groups_are_saved_and_counted():
    objective = perturbed(CrowdLayer(C, R, groups=[2, 0, 2, 1]), torch.float32)
    assert "groups=3" in repr(objective) and objective.annotators.weight.shape == (3, C, C)
    fresh = CrowdLayer(C, R, groups=[0, 1, 2, 0])
    fresh.load_state_dict(objective.state_dict())
    assert torch.equal(fresh.confusion(), objective.confusion())


def test_groups_of_annotators_with_few_labels_are_learned_together():
    """60 annotators, 30 labels each: a third are good, the others call most things their kind's favourite."""
    kinds = torch.arange(60) % 3
    right = torch.tensor([0.9, 0.3, 0.4])[:, None, None]
    favourite = torch.full((3, 1, 6), 1 / 6)
    favourite[1:] = torch.eye(6)[0]
    confusion = (right * torch.eye(6) + (1 - right) * favourite)[kinds]
    x, truth = wide_blobs(600, 6)
    annotations = wide_annotations(truth, confusion, 3)
    test_x, test_truth = wide_blobs(1000, 6, seed=3)
    errors, accuracies = [], []
    for objective in (TraceRegularized(6, 60, groups=kinds), TraceRegularized(6, 60), MajorityVote(6, 60)):
        classifier = fit_wide(objective, x, annotations)
        accuracies.append((classifier(test_x).argmax(-1) == test_truth).float().mean().item())
        if objective.models_annotators:
            errors.append((objective.confusion() - confusion).pow(2).mean().item())
    assert errors[0] < 0.004 and errors[0] < 0.3 * errors[1]
    assert accuracies[0] > 0.95 and accuracies[0] > accuracies[2] + 0.1


# Systems


@pytest.mark.parametrize(
    "make",
    [
        partial(GeoCrowdNet, volume="F"),
        partial(GeoCrowdNet, volume="W", scope="batch"),
        partial(TraceRegularized, rank=2, scope="batch", groups=[0, 1, 0, 2, 2, 1]),
        partial(CrowdLayer, rank=2),
    ],
    ids=["F", "W", "trace", "crowd-layer"],
)
def test_torch_func_and_compile(make, monkeypatch):
    monkeypatch.setattr(test_systems, "ATTACHED", {"this": make})
    test_systems.test_functional_call_and_func_grad("this")
    test_systems.test_compiled_step_equals_eager_and_is_compiled_once("this")
