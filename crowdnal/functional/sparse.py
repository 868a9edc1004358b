"""Sparse gradients of confusions: only the matrices of the batch's annotators, whatever R is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from crowdnal.data import Annotations
from crowdnal.functional.segments import Index
from crowdnal.ops.select import select as select_op


class _Select(Function):
    @staticmethod
    def forward(ctx: Any, confusion: Tensor, annotators: Tensor, distinct: bool) -> Tensor:
        ctx.save_for_backward(annotators)
        ctx.size, ctx.distinct = confusion.shape, distinct
        return select_op(confusion, annotators)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (annotators,) = ctx.saved_tensors
        sparse = torch.sparse_coo_tensor(
            annotators.unsqueeze(0), grad, ctx.size, check_invariants=False, is_coalesced=ctx.distinct
        )
        return sparse, None, None


def select(confusion: Tensor, annotators: Tensor, *, distinct: bool = False) -> Tensor:
    """confusion[annotators] whose gradient is a sparse COO tensor; `distinct`: they are, and ascend."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "sparse_grad=True cannot be compiled: torch.compile knows no sparse gradients. Use sparse_grad=False, or "
            "compile the backbone alone"
        )
    return _Select.apply(confusion, annotators, distinct)


def compact(confusion: Tensor, annotations: Annotations) -> tuple[Tensor, Index]:
    """The matrices of the annotators who are present, and index tensors that count only those.

    Raises:
        RuntimeError: the matrices are among those whose gradients ``DistributedDataParallel`` joins.
    """
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if active is not None:
        joined = (p for name, p in active.module.named_parameters() if name not in active.parameters_to_ignore)
        if any(parameter is confusion for parameter in joined):
            raise RuntimeError(
                "sparse_grad=True cannot be used under DistributedDataParallel, whose buckets are dense: use "
                "sparse_grad=False, or a rank= for many annotators"
            )
    index = annotations.indptr, annotations.item, annotations.active_index, annotations.order, None
    return select(confusion, annotations.active_annotators, distinct=True), index
