"""The softmax link's entries for the table of ops that `kernels.py` times."""

from __future__ import annotations

from functools import partial

import torch
from _formulations import Candidate, Formulation, Op, Problem, plain, traffic
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy, embedding

from crowdnal.functional import crowd_cross_entropy


def leaves(p: Problem) -> list[Tensor]:
    return [p.normal(p.B, p.C).softmax(1), torch.eye(p.C, dtype=p.dtype) + 0.1 * p.normal(p.R, p.C, p.C)]


def dense(scores: Tensor, confusion: Tensor, targets: Tensor) -> Tensor:
    h = torch.einsum("bc,rck->brk", scores, confusion)
    return cross_entropy(h.flatten(0, 1), targets.flatten(), ignore_index=-1)


def gather(scores: Tensor, confusion: Tensor, item: Tensor, annotator: Tensor, label: Tensor) -> Tensor:
    # index_select: up to 4 times as fast as confusion[annotator], whose gradient is an index_put
    rows, matrices = scores.index_select(0, item), confusion.index_select(0, annotator)
    return cross_entropy(torch.bmm(rows.unsqueeze(1), matrices).squeeze(1), label)


def crowdkit_crowd_layer(p: Problem) -> Candidate:
    from crowdkit.learning import CrowdLayer

    scores, confusion = p.leaves
    layer = CrowdLayer(p.C, 1)  # sized by its weight, which is [R, observed, true]
    layer.weight = Parameter(confusion.detach().mT.contiguous())

    def function(item: Tensor, annotator: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(layer(scores.index_select(0, item), annotator), label)

    return Candidate(function, p.index, [scores, layer.weight], lambda g: [g[0], g[1].mT])


def work(p: Problem) -> tuple[float, float]:
    # Operations: a matrix-vector product per annotation forward and for each of two gradients; exp, sum, divide,
    # subtract for each of its scores. Bytes: see `traffic`, with K probabilities per annotation kept for the backward.
    return traffic(p), 6 * p.nnz * p.C**2 + 4 * p.nnz * p.C


# Sparse gradients


def sparse_gather(scores: Tensor, confusion: Tensor, item: Tensor, annotator: Tensor, label: Tensor) -> Tensor:
    matrices = embedding(annotator, confusion, sparse=True).unflatten(1, (scores.shape[1], -1))
    return cross_entropy(torch.bmm(scores.index_select(0, item).unsqueeze(1), matrices).squeeze(1), label)


def embedded(p: Problem) -> Candidate:
    scores, confusion = p.leaves
    table = Parameter(confusion.detach().flatten(1))  # an embedding has one row an index
    return Candidate(
        sparse_gather, (scores, table, *p.index), [scores, table], lambda g: [g[0], g[1].to_dense().view_as(confusion)]
    )


def ours_sparse(p: Problem) -> Candidate:
    call = partial(crowd_cross_entropy, sparse_grad=True)
    p.annotations.prepare(active=True)
    return Candidate(call, (*p.leaves, p.annotations), p.leaves, lambda g: [g[0], g[1].to_dense()])


def sparse_work(p: Problem) -> tuple[float, float]:
    return traffic(p, sparse=True), work(p)[1]


SOFTMAX_OPS = [
    Op(
        "crowd_cross_entropy",
        leaves,
        plain(crowd_cross_entropy, lambda p: (p.annotations,)),
        [
            Formulation("dense", plain(dense, lambda p: (p.dense,)), (3, 0, 1), (2, 0, 1)),
            Formulation("gather + bmm", plain(gather, lambda p: p.index), (0, 2, 0), (0, 1, 0)),
            Formulation("crowd-kit CrowdLayer", crowdkit_crowd_layer, (0, 2, 0)),
        ],
        work,
    ),
    Op(
        "crowd_cross_entropy sparse_grad",
        leaves,
        ours_sparse,
        [
            Formulation("gather + bmm", plain(gather, lambda p: p.index), (0, 2, 0), (0, 1, 0)),
            Formulation("embedding(sparse=True) + bmm", embedded, (0, 3, 0)),
        ],
        sparse_work,
    ),
]
