"""What the losses and EM are built on, for `gpu.py`: mixing, the log-likelihood of labels, an EM step, selection."""

from __future__ import annotations

import torch
from _formulations import Formulation, Op, Problem, plain, traffic
from _joint import cells, em_leaves, em_work, marginal_work, without_gradients
from _softmax import leaves as scores_and_matrices
from torch import Tensor

from crowdnal import Annotations
from crowdnal.functional import em_step, label_log_likelihood, mix
from crowdnal.ops import OPS


def mixed(scores: Tensor, confusion: Tensor, annotations: Annotations) -> Tensor:
    return mix(scores, confusion, annotations).square().mean()


def mixed_matrices(scores: Tensor, confusion: Tensor, item: Tensor, annotator: Tensor, label: Tensor) -> Tensor:
    rows, matrices = scores.index_select(0, item), confusion.index_select(0, annotator)
    return torch.bmm(rows.unsqueeze(1), matrices).square().mean()


def mix_work(p: Problem) -> tuple[float, float]:
    # A matrix-vector product per annotation forward and for each of two gradients; the square and its derivative.
    return traffic(p), 6 * p.nnz * p.C**2 + 3 * p.nnz * p.C


def evidence(log_prior: Tensor, log_confusion: Tensor, annotations: Annotations) -> Tensor:
    return (log_prior + label_log_likelihood(log_confusion, annotations)).square().mean()


def evidence_rows(log_prior: Tensor, log_confusion: Tensor, item: Tensor, cell: Tensor) -> Tensor:
    return log_prior.index_add(0, item, log_confusion.flatten(0, 1).index_select(0, cell)).square().mean()


def step(log_prior: Tensor, log_confusion: Tensor, annotations: Annotations) -> Tensor:
    """The counts, and behind them the rest."""
    wide = log_prior.to(torch.promote_types(log_prior.dtype, torch.float32))
    loss, posterior, counts, totals = em_step(wide, log_confusion, None, annotations)
    return torch.cat([counts.flatten(), posterior.flatten(), totals, loss.unsqueeze(0)])


def step_rows(log_prior: Tensor, log_confusion: Tensor, item: Tensor, cell: Tensor) -> Tensor:
    rows = log_confusion.flatten(0, 1)
    joint = log_prior.index_add(0, item, rows.index_select(0, cell))
    posterior = joint.softmax(1)
    counts = torch.zeros_like(rows).index_add_(0, cell, posterior.index_select(0, item))
    informed = torch.zeros_like(log_prior[:, 0]).index_fill(0, item, 1.0)
    loss = -(joint.logsumexp(1) * informed).sum()
    return torch.cat([counts.flatten(), posterior.flatten(), informed @ posterior, loss.unsqueeze(0)])


def chosen(_: Tensor, confusion: Tensor, annotators: Tensor) -> Tensor:
    return OPS["select"](confusion, annotators)


def indexed(_: Tensor, confusion: Tensor, annotators: Tensor) -> Tensor:
    return confusion.index_select(0, annotators)


def active(p: Problem) -> tuple[Tensor]:
    return (p.annotations.active_annotators,)


def select_work(p: Problem) -> tuple[float, float]:
    return 2 * p.active * p.C**2 * p.dtype.itemsize + 8 * p.active, 0


def whole(p: Problem) -> tuple[Annotations]:
    return (p.annotations,)


PRIMITIVE_OPS = [
    Op(
        "mix",
        scores_and_matrices,
        plain(mixed, whole),
        [Formulation("gather + bmm", plain(mixed_matrices, lambda p: p.index), (0, 3, 0), (0, 3, 0))],
        mix_work,
    ),
    Op(
        "label_log_likelihood",
        em_leaves,
        plain(evidence, whole),
        [Formulation("gather rows", plain(evidence_rows, cells), (0, 0, 1), (0, 0, 1))],
        lambda p: (marginal_work(p)[0], 2 * p.nnz * p.C),
    ),
    Op(
        "em_step",
        em_leaves,
        without_gradients(step, whole),
        [Formulation("gather rows", without_gradients(step_rows, cells), (0, 0, 2), (0, 0, 2))],
        em_work,
    ),
    Op(
        "select",
        scores_and_matrices,
        without_gradients(chosen, active),
        [Formulation("index_select", without_gradients(indexed, active), (0, 0, 1), (0, 0, 1))],
        select_work,
    ),
]
