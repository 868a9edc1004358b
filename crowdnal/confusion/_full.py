"""Full matrices, and vectors, of each annotator."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from crowdnal import reference
from crowdnal._utils.distributed import assign
from crowdnal._utils.options import check_choice
from crowdnal.data import Annotations
from crowdnal.functional import DirichletPrior, Reduction, crowd_cross_entropy, crowd_mixture_nll
from crowdnal.functional.reduction import reduce
from crowdnal.functional.segments import gather_rows, index_of, mix_indexed
from crowdnal.functional.sparse import compact, select

Normalization = Literal["softmax", "softplus"]


def eye(num_classes: int, num_labels: int) -> Tensor:
    """Rectangular identity ``[C, K]``: ones where true class and observed label have the same index."""
    return torch.eye(num_classes, num_labels)


def whole(parameter: Tensor) -> Tensor:
    """A parameter, detached, at least in float32; one that FSDP sharded is put together (on all ranks)."""
    parameter = parameter.detach()
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.to(torch.promote_types(full.dtype, torch.float32))


def root(square: Tensor) -> Tensor:
    """Square root that has derivatives 0, of every order, where there is none: at 0 (and below, by rounding)."""
    return square.where(square > 0, 1.0).sqrt().where(square > 0, 0.0)


class FreeConfusion(nn.Module):
    """Unconstrained matrix per annotator for the softmax link, initialised to ``scale`` times the identity.

    ``weight [R, C, K]``: row k holds the scores of the observed labels when the true class is k. ``sparse_grad``:
    gradients through the matrices of given annotators are sparse. ``common``: a buffer ``[C, K]``, initialised to 0,
    holds logarithms of what all have in common, which the matrices deviate from: it is added to the rows that are shown
    (and `shared_scores` to the scores ``p W_r``, which is the caller's part).
    """

    common: Tensor | None

    def __init__(
        self, num_annotators: int, num_classes: int, num_labels: int, *,
        scale: float = 1.0, sparse_grad: bool = False, common: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scale = scale
        self.sparse_grad = sparse_grad
        self.register_buffer("common", torch.zeros(num_classes, num_labels) if common else None)
        self.weight = nn.Parameter(torch.empty(num_annotators, num_classes, num_labels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the parameters to their init."""
        with torch.no_grad():
            self.weight.copy_(self.scale * eye(*self.weight.shape[1:]))

    def scores(self, probs: Tensor, annotations: Annotations) -> Tensor:
        """Scores of the observed labels ``[nnz, K]`` given ``probs [B, C]``."""
        weight, index = compact(self.weight, annotations) if self.sparse_grad else (self.weight, index_of(annotations))
        return mix_indexed(probs, weight.to(probs.dtype), index)

    @torch.no_grad()
    def begin(self, log_crowd: Tensor) -> None:
        """Everyone is like the crowd ``[C, K]``, as logarithms: in ``common``, or else in their own matrix."""
        if self.common is None:
            assign(self.weight, log_crowd.to(self.weight.dtype).expand(self.weight.shape))
        else:
            self.common.copy_(log_crowd)
            assign(self.weight, torch.zeros_like(self.weight))

    def log_rows(self, annotators: Tensor) -> Tensor:
        """Differentiable ``[r, C, K]``: logarithms of the rows that are shown, of these annotators."""
        matrices = self._of(annotators)
        return (matrices if self.common is None else matrices + self.common.to(matrices.dtype)).log_softmax(-1)

    def _of(self, annotators: Tensor) -> Tensor:
        """Differentiable matrices of these annotators, at least in float32."""
        weight = select(self.weight, annotators) if self.sparse_grad else self.weight[annotators]
        return weight.to(torch.promote_types(weight.dtype, torch.float32))

    def nll(
        self,
        probs: Tensor,
        annotations: Annotations,
        weight: Tensor | None,
        reduction: Reduction,
        *,
        shared: Tensor | None = None,
        mixing: Tensor | None = None,
        prior: DirichletPrior | None = None,
    ) -> Tensor:
        """:func:`crowdnal.functional.crowd_cross_entropy` through these matrices; the prior is of what is shown.

        With a prior and without ``shared``, scores of what is common are added.
        """
        if prior is not None:
            prior = DirichletPrior(prior.counts, prior.labels_given, self.common)
        return crowd_cross_entropy(
            probs, self.weight, annotations, weight=weight, reduction=reduction, shared=shared, mixing=mixing,
            sparse_grad=self.sparse_grad, prior=prior,
        )  # fmt: skip

    def distances(self, common: Tensor, annotators: Tensor | None = None) -> Tensor:
        """Differentiable ``‖W_r - common‖`` (Frobenius; 0 without a gradient where equal) of all, or of these."""
        weight = self.weight if annotators is None else self._of(annotators)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return root((weight.to(dtype) - common.to(dtype)).square().sum((1, 2)))

    def row(self, k: int) -> Tensor:
        """``[R, 1, K]``, detached: row k of every matrix."""
        return whole(self.weight)[:, k : k + 1]

    def matrices(self, annotators: Tensor | slice) -> Tensor:
        """``[r, C, K]``, detached: W of these annotators."""
        return whole(self.weight)[annotators]

    def times(self, rows: Tensor, annotators: Tensor | slice) -> Tensor:
        """``rows @ W``, detached, of these annotators: ``[r, n, K]`` for rows ``[r, n, C]``."""
        return rows @ self.matrices(annotators)

    def probs(self) -> Tensor:
        """``[R, C, K]``: softmax of each row."""
        weight = whole(self.weight)
        return (weight if self.common is None else weight + self.common.to(weight.dtype)).softmax(-1)

    @override
    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, scale={self.scale}"


def shared_scores(probs: Tensor, common: Tensor) -> Tensor:
    """``log(p exp(common))`` ``[B, K]``: of labels that come from confusions ``[C, K]`` given as logarithms."""
    return reference.common_scores(probs, common.to(probs.dtype))


class VectorConfusion(nn.Module):
    """A scale and/or a bias per class and annotator for the softmax link: ``h = p * scale_r + bias_r``.

    ``scale [R, C]`` is initialised to 1, ``bias [R, C]`` to 0; one that is not asked for is None. Needs K = C.
    """

    scale: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, num_annotators: int, num_classes: int, *, scale: bool = True, bias: bool = False) -> None:
        super().__init__()
        if not (scale or bias):
            raise ValueError("scale and bias are both False: a VectorConfusion needs at least one of them")
        self.num_classes = num_classes
        shape = (num_annotators, num_classes)
        self.register_parameter("scale", nn.Parameter(torch.ones(shape)) if scale else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(shape)) if bias else None)

    def reset_parameters(self) -> None:
        """Sets the parameters to their init."""
        with torch.no_grad():
            if self.scale is not None:
                self.scale.fill_(1.0)
            if self.bias is not None:
                self.bias.zero_()

    def scores(self, probs: Tensor, annotations: Annotations) -> Tensor:
        """Scores of the observed labels ``[nnz, C]`` given ``probs [B, C]``; nothing larger is built."""
        annotator, order = annotations.annotator, annotations.order
        h = gather_rows(probs, annotations.item, torch.arange(len(annotator), device=annotator.device))
        if self.scale is not None:
            h = h * gather_rows(self.scale.to(h.dtype), annotator, order)
        if self.bias is not None:
            h = h + gather_rows(self.bias.to(h.dtype), annotator, order)
        return h

    def nll(self, probs: Tensor, annotations: Annotations, weight: Tensor | None, reduction: Reduction) -> Tensor:
        """Cross-entropy of each label against the softmax of its scores."""
        loss = F.cross_entropy(self.scores(probs, annotations), annotations.label, reduction="none")
        return reduce(loss, annotations, weight, reduction)

    def probs(self) -> Tensor:
        """``[R, C, C]``: softmax of the scores of a classifier that is certain of class k, for every k."""
        h = torch.eye(self.num_classes, device=next(self.parameters()).device)
        if self.scale is not None:
            h = h * whole(self.scale)[:, None, :]
        if self.bias is not None:
            h = h + whole(self.bias)[:, None, :]
        return h.softmax(-1)

    @override
    def extra_repr(self) -> str:
        shape = tuple(next(self.parameters()).shape)
        return f"{shape}, scale={self.scale is not None}, bias={self.bias is not None}"


class NormalizedConfusion(nn.Module):
    """Row-stochastic matrix per annotator for the mixture link: ``f(weight)`` normalised over labels.

    ``weight [R, K, C]`` is stored with the observed label outermost, so that an annotation reads one
    contiguous C-vector. ``f`` is ``softplus`` (Tanno et al. 2019) or ``exp`` (``normalization="softmax"``).
    Init: ``off + (on - off) I``. ``sparse_grad``: gradients through the matrices of given annotators are sparse.
    """

    def __init__(
        self, num_annotators: int, num_classes: int, num_labels: int, *,
        normalization: Normalization = "softplus", on: float = 1.0, off: float = -5.0, sparse_grad: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        check_choice(Normalization, normalization=normalization)
        self.normalization: Normalization = normalization
        self.on, self.off = on, off
        self.sparse_grad = sparse_grad
        self.weight = nn.Parameter(torch.empty(num_annotators, num_labels, num_classes))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the parameters to their init."""
        with torch.no_grad():
            self.weight.copy_(self.off + (self.on - self.off) * eye(*self.weight.shape[1:]))

    def nll(
        self, log_probs: Tensor, annotations: Annotations, weight: Tensor | None, reduction: Reduction, *,
        prior: DirichletPrior | None = None,
    ) -> Tensor:  # fmt: skip
        """:func:`crowdnal.functional.crowd_mixture_nll` through these matrices; the prior is of their rows."""
        return crowd_mixture_nll(
            log_probs,
            self.weight,
            annotations,
            normalization=self.normalization,
            weight=weight,
            reduction=reduction,
            sparse_grad=self.sparse_grad,
            prior=prior,
        )

    def log_probs(self, annotators: Tensor | None = None) -> Tensor:
        """Differentiable ``log A [R, K, C]`` (observed label outermost), or of the given annotators only."""
        weight: Tensor = self.weight
        if annotators is not None:
            weight = select(weight, annotators) if self.sparse_grad else weight[annotators]
        return self._log(weight.to(torch.promote_types(weight.dtype, torch.float32)))

    def _log(self, weight: Tensor) -> Tensor:
        softplus = self.normalization == "softplus"
        return reference.log_confusion(weight, reference.SOFTPLUS if softplus else reference.SOFTMAX)

    @torch.no_grad()
    def begin(self, log_crowd: Tensor) -> None:
        """Everyone's matrix is that of the crowd ``[C, K]``, given as logarithms."""
        table = log_crowd if self.normalization == "softmax" else log_crowd.exp().expm1().log()
        assign(self.weight, table.t().to(self.weight.dtype).expand(self.weight.shape))

    def log_rows(self, annotators: Tensor) -> Tensor:
        """Differentiable ``[r, C, K]``: logarithms of the rows of these annotators."""
        return self.log_probs(annotators).transpose(1, 2)

    def traces(self, annotators: Tensor | None = None) -> Tensor:
        """Differentiable trace of every (given) annotator's matrix, ``[R]``; of min(C, K) cells."""
        return self.log_probs(annotators).diagonal(dim1=1, dim2=2).exp().sum(-1)

    def square_norms(self) -> Tensor:
        """Differentiable ``‖A_r‖²`` (Frobenius) of every annotator's matrix, ``[R]``."""
        return (2 * self.log_probs()).exp().sum((1, 2))

    def gram(self, weights: Tensor, annotators: Tensor | None = None) -> Tensor:
        """Differentiable ``Σ_r weights_r A_r A_rᵀ`` ``[C, C]`` of all, or of these annotators."""
        stacked = self.log_probs(annotators).exp()
        weighted = stacked * weights.to(stacked.dtype)[:, None, None]
        return weighted.flatten(0, 1).T @ stacked.flatten(0, 1)

    def probs(self) -> Tensor:
        """``[R, C, K]``, as users see it."""
        return self._log(whole(self.weight)).exp().transpose(1, 2).contiguous()

    @override
    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, normalization={self.normalization!r}"
