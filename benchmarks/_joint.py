"""The joint link's entries for the table of ops that `kernels.py` times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from _formulations import Candidate, Formulation, Op, Problem, plain
from _mixture import mixture_leaves
from torch import Tensor
from torch.nn.functional import one_hot

from crowdnal import Annotations
from crowdnal.functional import crowd_marginal_nll, crowd_posterior, label_counts


def cells(p: Problem) -> tuple[Tensor, Tensor]:
    """(item, row of the flattened [R x K, C] confusion) of every annotation."""
    item, annotator, label = p.index
    return item, annotator * p.C + label


def indicators(p: Problem) -> tuple[Tensor]:
    """[B, R, K]: 1 where the annotator gave the item that label."""
    return (one_hot(p.dense.clamp(min=0), p.C).mul(p.dense.unsqueeze(2) >= 0).to(p.dtype),)


# Marginal likelihood, with gradients


def marginal_dense(log_prior: Tensor, confusion: Tensor, seen: Tensor) -> Tensor:
    log_a = confusion.log_softmax(1)
    return -(log_prior + torch.einsum("brk,rkc->bc", seen, log_a)).logsumexp(1).mean()


def marginal_matrices(log_prior: Tensor, confusion: Tensor, item: Tensor, annotator: Tensor, label: Tensor) -> Tensor:
    log_a = confusion.index_select(0, annotator).log_softmax(1)
    rows = log_a.gather(1, label.view(-1, 1, 1).expand(-1, 1, log_a.shape[2])).squeeze(1)
    return -log_prior.index_add(0, item, rows).logsumexp(1).mean()


def marginal_rows(log_prior: Tensor, confusion: Tensor, item: Tensor, cell: Tensor) -> Tensor:
    rows = confusion.log_softmax(1).flatten(0, 1).index_select(0, cell)
    return -log_prior.index_add(0, item, rows).logsumexp(1).mean()


def marginal_work(p: Problem) -> tuple[float, float]:
    # Bytes: priors, posteriors (written, then read) and the priors' gradient; the matrices of annotators who are
    # present read twice, a gradient dense in R; indptr, annotator, order and label twice. Operations: a matrix element
    # exp, sum, difference forward and exp, product, difference, sum backward; an annotation's row one addition each
    # way; a posterior exp, sum, divide, product.
    numbers = 4 * p.B * p.C + (2 * p.active + p.R) * p.C**2
    bytes_needed = numbers * p.dtype.itemsize + 2 * 8 * (3 * p.nnz + p.B + 1)
    return bytes_needed, 7 * p.active * p.C**2 + 2 * p.nnz * p.C + 4 * p.B * p.C


# An E-step and the counts of an M-step, without gradients


def em_ours(log_prior: Tensor, log_confusion: Tensor, annotations: Annotations) -> Tensor:
    return label_counts(crowd_posterior(log_prior, log_confusion, annotations, normalization="none"), annotations)


def em_dense(log_prior: Tensor, log_confusion: Tensor, seen: Tensor) -> Tensor:
    posterior = (log_prior + torch.einsum("brk,rkc->bc", seen, log_confusion)).softmax(1)
    return torch.einsum("brk,bc->rkc", seen, posterior)


def em_rows(log_prior: Tensor, log_confusion: Tensor, item: Tensor, cell: Tensor) -> Tensor:
    rows = log_confusion.flatten(0, 1)
    posterior = log_prior.index_add(0, item, rows.index_select(0, cell)).softmax(1)
    return torch.zeros_like(rows).index_add_(0, cell, posterior.index_select(0, item)).view_as(log_confusion)


def em_leaves(p: Problem) -> list[Tensor]:
    log_prior, confusion = mixture_leaves(p)
    return [log_prior, confusion.log_softmax(1)]


def without_gradients(
    function: Callable[..., Tensor], data: Callable[[Problem], Sequence[Any]]
) -> Callable[[Problem], Candidate]:
    return lambda p: Candidate(function, (*(leaf.detach() for leaf in p.leaves), *data(p)), [])


def em_work(p: Problem) -> tuple[float, float]:
    # Bytes: priors, posteriors (written, then read), matrices of annotators who are present, counts dense in R; indptr,
    # annotator and label twice. Operations: an addition per element of an annotation's row in each of both steps;
    # a posterior exp, sum, divide.
    numbers = 3 * p.B * p.C + (p.active + p.R) * p.C**2
    return numbers * p.dtype.itemsize + 2 * 8 * (2 * p.nnz + p.B + 1), 2 * p.nnz * p.C + 3 * p.B * p.C


JOINT_OPS = [
    Op(
        "crowd_marginal_nll softmax",
        mixture_leaves,
        plain(crowd_marginal_nll, lambda p: (p.annotations,)),
        [
            Formulation("dense", plain(marginal_dense, indicators), (2, 0, 4), (2, 0, 3)),
            Formulation("gather matrices", plain(marginal_matrices, lambda p: p.index), (0, 5, 0), (0, 3, 0)),
            Formulation("gather rows", plain(marginal_rows, cells), (0, 0, 4), (0, 0, 3)),
        ],
        marginal_work,
    ),
    Op(
        "crowd_posterior + label_counts",
        em_leaves,
        without_gradients(em_ours, lambda p: (p.annotations,)),
        [
            Formulation("dense", without_gradients(em_dense, indicators), (2, 0, 1), (2, 0, 1)),
            Formulation("gather rows", without_gradients(em_rows, cells), (0, 0, 1), (0, 0, 1)),
        ],
        em_work,
    ),
]
