"""The mixture link's entries for the table of ops that `kernels.py` times."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from _formulations import Candidate, Formulation, Op, Problem, plain, traffic
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import nll_loss, softplus

from crowdnal.functional import crowd_mixture_nll


def mixture_leaves(p: Problem) -> list[Tensor]:
    return [p.normal(p.B, p.C).log_softmax(1), 3 * torch.eye(p.C, dtype=p.dtype) + p.normal(p.R, p.C, p.C)]


def normalise(confusion: Tensor, kind: str) -> Tensor:
    """A [..., K, C] of stored values: sums to 1 over the observed label."""
    if kind == "softmax":
        return confusion.softmax(-2)
    positive = softplus(confusion)
    return positive / positive.sum(-2, keepdim=True)


def mixture_dense(log_probs: Tensor, confusion: Tensor, targets: Tensor, kind: str) -> Tensor:
    q = torch.einsum("bc,rkc->brk", log_probs.exp(), normalise(confusion, kind))
    seen = targets >= 0
    chosen = q.gather(2, targets.clamp(min=0).unsqueeze(2)).squeeze(2)
    return -torch.where(seen, chosen, 1.0).log().sum() / seen.sum()


def mixture_matrices(
    log_probs: Tensor, confusion: Tensor, item: Tensor, annotator: Tensor, label: Tensor, kind: str
) -> Tensor:
    matrices = normalise(confusion.index_select(0, annotator), kind)
    q = torch.bmm(log_probs.exp().index_select(0, item).unsqueeze(1), matrices.mT).squeeze(1)
    return nll_loss(q.log(), label)


def mixture_rows(
    log_probs: Tensor, confusion: Tensor, item: Tensor, annotator: Tensor, label: Tensor, kind: str
) -> Tensor:
    rows = normalise(confusion, kind).flatten(0, 1).index_select(0, annotator * confusion.shape[1] + label)
    return -(log_probs.exp().index_select(0, item) * rows).sum(1).log().mean()


def crowdkit_conal(p: Problem) -> Candidate:
    from crowdkit.learning import CoNAL

    class NoCommonConfusion(CoNAL):
        """With its common rate at 0 CoNAL is the mixture link."""

        def simple_common_module(self, input: Tensor, workers: Tensor) -> Tensor:
            return input.new_zeros(())

    log_probs, confusion = p.leaves
    with warnings.catch_warnings(action="ignore"):  # its LazyLinear, which stays unused
        layer = NoCommonConfusion(p.C, 1)
    layer.common_confusion_matrix.data = layer.common_confusion_matrix.data.to(p.dtype)
    layer.annotator_confusion_matrices = Parameter(confusion.detach().mT.contiguous())
    item, _, _ = p.index
    share = torch.bincount(item, minlength=p.B).unsqueeze(1) / p.nnz

    def function(item: Tensor, annotator: Tensor, label: Tensor) -> Tensor:
        rows = log_probs.index_select(0, item)
        return nll_loss(layer(rows, rows, annotator), label)

    def canonical(grads: list[Tensor]) -> list[Tensor]:
        # It normalises the log-probabilities once more, which takes from a row's gradient p times the row's sum.
        return [grads[0] - log_probs.detach().exp() * share, grads[1].mT]

    return Candidate(function, p.index, [log_probs, layer.annotator_confusion_matrices], canonical)


def mixture_work(p: Problem) -> tuple[float, float]:
    # Operations: a matrix element of an active annotator takes activation, exp, sum forward and exp, product,
    # difference, sum, activation' backward; an element of an annotation's row add, exp, sum, divide and 4 backward.
    # An exp or log counts as one, so this share is a lower bound. Bytes: see `traffic`.
    return traffic(p), 8 * p.active * p.C**2 + 8 * p.nnz * p.C


def mixture_op(kind: Any) -> Op:
    def ours(p: Problem) -> Candidate:
        log_probs, confusion = p.leaves
        call = partial(crowd_mixture_nll, normalization=kind)
        return Candidate(call, (log_probs, confusion, p.annotations), p.leaves)

    dense = plain(mixture_dense, lambda p: (p.dense, kind))
    matrices = plain(mixture_matrices, lambda p: (*p.index, kind))
    rows = plain(mixture_rows, lambda p: (*p.index, kind))
    others = [
        Formulation("dense", dense, (2, 0, 4), (1, 0, 2)),
        Formulation("gather matrices + bmm", matrices, (0, 7, 0), (0, 2, 0)),
        Formulation("gather rows", rows, (0, 0, 6), (0, 0, 2)),
    ]
    if kind == "softmax":
        others.append(Formulation("crowd-kit CoNAL", crowdkit_conal, (0, 4, 0)))
    return Op(f"crowd_mixture_nll {kind}", mixture_leaves, ours, others, mixture_work)


MIXTURE_OPS = [mixture_op("softplus"), mixture_op("softmax")]
