"""CoNAL with low-rank and with shared individual confusions: what it is with full ones of the same values."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_close
from support.conal import FEATURES, OPTIONS, D, make
from support.low_rank import dense_scores
from support.memory import Largest
from support.small_crowd import C, R, batch, logits_of, perturbed
from torch import Tensor

from crowdnal.data import Annotations
from crowdnal.objectives import CoNAL

PLAIN = ["logits", "probabilities", "items not normalised", "batch", "people"]


def full_like(objective: CoNAL, matrices: Tensor, **options) -> CoNAL:
    """CoNAL whose individual matrices are these [R, C, K], the rest as in ``objective``."""
    full = make(num_labels=objective.num_labels, **options).double()
    state = {k: v for k, v in objective.state_dict().items() if not k.startswith(("annotators.", "groups"))}
    full.load_state_dict(state | {"annotators.weight": matrices.detach()})
    return full


def shows_the_same(low: CoNAL, full: CoNAL) -> None:
    logits, annotations = logits_of(), batch(True)
    assert_close(low.confusion(), full.confusion())
    assert_close(low.reliability(), full.reliability())
    for method in ("posterior", "log_likelihood"):
        assert_close(*(getattr(o, method)(logits, annotations, FEATURES) for o in (low, full)))


@pytest.mark.parametrize("labels", [C, 5, 2])
@pytest.mark.parametrize("name", PLAIN)
def test_low_rank_is_the_full_matrix_of_the_same_values(name, labels):
    options = OPTIONS[name]
    low = perturbed(make(rank=2, num_labels=labels, **options))
    some = Annotations([0, 2, 2, 5, 6], [0, 2, 1, 0, 3, 1], [1, 0, 1, 1, 0, 1], num_annotators=R, num_classes=labels)
    for reduction in ("mean", "item_mean", "sum", "none"):
        low.reduction = reduction
        full = full_like(low, dense_scores(low.annotators), reduction=reduction, **options)
        logits = logits_of().requires_grad_()
        losses = [o(logits, some, FEATURES) for o in (low, full)]
        assert_close(*losses)
        others = [[p for n, p in o.named_parameters() if not n.startswith("annotators.")] for o in (low, full)]
        upstream = torch.linspace(0.5, 2, losses[0].numel(), dtype=torch.float64).view_as(losses[0])
        ours, theirs = (
            torch.autograd.grad(loss, [logits, *mine, *o.annotators.parameters()], upstream, materialize_grads=True)
            for loss, mine, o in zip(losses, others, (low, full), strict=True)
        )
        assert_close(ours[:-3], theirs[:-1])
        factors = list(low.annotators.parameters())
        chained = torch.autograd.grad(dense_scores(low.annotators), factors, theirs[-1])
        assert_close(ours[-3:], chained)
    if labels == C:
        shows_the_same(low, full)


@pytest.mark.parametrize("sizes", [(4, 4), (5, 3), (3, 5)])
def test_distances_are_those_of_the_matrices(sizes):
    objective = perturbed(make(sizes[0], 6, num_labels=sizes[1], rank=2))
    low, common = objective.annotators, objective.common
    expected = (dense_scores(low) - common).flatten(1).norm(dim=1)
    assert_close(low.distances(common), expected)
    assert_close(low.distances(common, torch.tensor([4, 1])), expected[[4, 1]])
    inputs = [common, *low.parameters()]
    assert_close(torch.autograd.grad(low.distances(common).sum(), inputs), torch.autograd.grad(expected.sum(), inputs))


def test_the_start_is_that_of_full_matrices_with_finite_derivatives():
    low, full = (make(separation_weight=0.3, **rank).double() for rank in ({"rank": 2}, {}))
    assert torch.equal(low.annotators.distances(low.common), torch.zeros(R, dtype=torch.float64))
    loss = low(logits_of(), batch(), FEATURES)
    assert_close(loss, full(logits_of(), batch(), FEATURES))
    grads = torch.autograd.grad(loss, list(low.parameters()), create_graph=True, materialize_grads=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), list(low.parameters()), materialize_grads=True)
    assert all(g.isfinite().all() for g in [*grads, *second]) and low.annotators.right.grad is None
    assert grads[[n for n, _ in low.named_parameters()].index("annotators.right")].abs().sum() > 0


@pytest.mark.parametrize("mixing", ["logits", "probabilities"])
def test_derivatives_of_second_order(mixing):
    objective = perturbed(make(rank=1, separation_weight=0.3, mixing=mixing))
    names = [name for name, _ in objective.named_parameters()]

    def loss(logits: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(objective, given, (logits, batch(), FEATURES))

    inputs = [logits_of().requires_grad_(), *(q.detach().clone().requires_grad_() for q in objective.parameters())]
    assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, inputs, fast_mode=True)


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("name", PLAIN)
def test_a_group_is_annotators_whose_matrices_are_equal(name, rank):
    groups, options = torch.tensor([1, 0, 1, 2]), OPTIONS[name]
    shared = perturbed(make(groups=groups, rank=rank, **options))
    assert "groups=3" in repr(shared)
    matrices = shared.annotators.weight if rank is None else dense_scores(shared.annotators)
    own = full_like(shared, matrices[groups], **options)
    logits = logits_of().requires_grad_()
    losses = [o(logits, batch(True), FEATURES) for o in (shared, own)]
    assert_close(*losses)
    theirs = torch.autograd.grad(losses[1], [logits, own.common, own.annotators.weight])
    inputs = [logits, shared.common, *shared.annotators.parameters()]
    ours = torch.autograd.grad(losses[0], inputs, retain_graph=True)
    assert_close(ours[:2], theirs[:2])
    summed = torch.zeros_like(matrices).index_add(0, groups, theirs[2])
    assert_close(ours[2:], torch.autograd.grad(matrices, inputs[2:], summed) if rank else (summed,))
    shows_the_same(shared, own)


def test_sparse_gradients_of_groups():
    options = {"groups": [1, 0, 1, 2], "scope": "batch", "separation_weight": 0.3}
    dense, sparse = (make(sparse_grad=flag, **options).double() for flag in (False, True))
    for o in (dense, sparse):
        perturbed(o)(logits_of(), batch(), FEATURES).backward()
    assert sparse.annotators.weight.grad.is_sparse
    assert_close(sparse.annotators.weight.grad.to_dense(), dense.annotators.weight.grad)


@pytest.mark.parametrize("scope", ["all", "batch"])
def test_no_matrix_is_built(scope):
    """40 classes, 50 annotators: 80,000 cells of matrices against 3,600 scores."""
    classes, items = 40, 30
    labels = torch.randint(0, classes, (items * 3,)).tolist()
    who = torch.randint(0, 50, (items * 3,)).tolist()
    some = Annotations([3 * i for i in range(items + 1)], who, labels, num_annotators=50, num_classes=classes)
    objective = make(classes, 50, rank=2, scope=scope)
    logits, features = torch.randn(items, classes, requires_grad=True), torch.randn(items, D)
    with Largest() as largest:
        objective(logits, some, features).backward()
    assert largest.elements <= max(len(who), 50) * classes * 2
    assert objective.posterior(logits.detach(), some, features).sum(1).tolist() == pytest.approx([1] * items, abs=1e-4)


def test_errors():
    with pytest.raises(ValueError, match="sparse_grad=True is for full matrices: leave it out with rank=2"):
        make(rank=2, sparse_grad=True, scope="batch")
    with pytest.raises(ValueError, match=r"rank=9 must be 1 to min"):
        make(rank=9)
