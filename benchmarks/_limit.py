"""What no formulation of an op can be faster than: an autograd Function that computes nothing."""

from __future__ import annotations

from typing import Any

import torch
from _formulations import Candidate, Problem
from torch import Tensor
from torch.autograd import Function


class Empty(Function):
    """Keeps its inputs, and makes a result like `output` and gradients that nobody writes to."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return None, *(torch.empty_like(tensor) if need else None for tensor, need in pairs)


def empty_step(ours: Candidate, problem: Problem, output: Tensor) -> Candidate:
    """`Empty` with the tensors of our step, backward where that has one."""
    a = problem.annotations
    data = (given for given in ours.arguments if isinstance(given, Tensor))
    tensors = {id(t): t for t in (*ours.leaves, *data, a.indptr, a.item, a.annotator, a.order, a.label)}
    return Candidate(Empty.apply, (output, *tensors.values()), ours.leaves)
