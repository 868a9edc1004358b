"""Groups of annotations that share a confusion, as a module: the parameters of CMM (Mena & Ñanculef 2019, table 1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from crowdnal._utils.distributed import assign
from crowdnal._utils.layers import set_input_size
from crowdnal.confusion import eye, whole
from crowdnal.data import Annotations
from crowdnal.functional import crowd_mixture_nll
from crowdnal.objectives._bases.batch import Batch
from crowdnal.objectives.cmm.em import as_one, group_log_probs


class GroupMixture(nn.Module):
    """``p(y=j|x) = Σ_m α_m Σ_k β^m[k, j] f_k(x)``, with constant α or ``α(x) = softmax(log α + W x)``.

    ``log_alpha [M]`` and ``log_beta [M, K, C]`` (observed label outermost) count up to a constant, which a softmax
    removes. Init: groups alike in number, right with probability 0.9 (the first) down to 0.5 (the last), W = 0.

    Args:
        trained: by gradients; otherwise the two are buffers in float64, for closed forms.
        gated: α depends on the items' features.
        feature_dim: their length; None: inferred later.
    """

    log_alpha: Tensor
    log_beta: Tensor

    def __init__(
        self, num_groups: int, num_classes: int, num_labels: int, *,
        trained: bool = True, gated: bool = False, feature_dim: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        right = torch.linspace(0.9, 0.5, num_groups).view(-1, 1, 1)
        beta = right * eye(num_classes, num_labels) + (1 - right) / num_labels
        log_beta = (beta / beta.sum(2, keepdim=True)).log().transpose(1, 2).contiguous()
        for name, value in (("log_alpha", torch.zeros(num_groups).log_softmax(0)), ("log_beta", log_beta)):
            if trained:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value.double())
        self.gate: nn.Linear | None = None
        if gated and feature_dim is None:
            self.gate = nn.LazyLinear(num_groups, bias=False)
        elif gated:
            assert feature_dim is not None
            self.gate = nn.Linear(feature_dim, num_groups, bias=False)
            nn.init.zeros_(self.gate.weight)

    def set_feature_dim(self, feature_dim: int) -> None:
        """Makes W, if it is not there yet; an error if it is for another length."""
        if self.gate is None:
            return
        fresh = isinstance(self.gate, nn.LazyLinear) and self.gate.has_uninitialized_params()
        set_input_size(self.gate, feature_dim)
        if fresh:
            nn.init.zeros_(self.gate.weight)

    @torch.no_grad()
    def set(self, log_alpha: Tensor, log_beta: Tensor) -> None:
        """New values, in place."""
        assign(self.log_alpha, log_alpha)
        assign(self.log_beta, log_beta)

    def log_weights(self, features: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Differentiable ``log α``: ``[M]``, or with a gate ``[B, M]`` for features ``[B, ...]`` (flattened)."""
        log_alpha = self.log_alpha.to(dtype)
        if self.gate is not None:
            assert features is not None  # the objective has seen to it
            features = features.flatten(1).to(dtype)
            self.set_feature_dim(features.shape[1])
            log_alpha = log_alpha + F.linear(features, self.gate.weight.to(dtype))
        return log_alpha.log_softmax(-1)

    def nll(self, batch: Batch) -> Tensor:
        """``-log p(y_n | x_i)``: one mixture over the M·C pairs of group and class, in the fused op."""
        logits, annotations, features, weight, reduction = batch
        log_weights = self.log_weights(features, logits.dtype).unsqueeze(-1)
        joint = (log_weights + logits.log_softmax(-1).unsqueeze(1)).flatten(1)
        stored = self.log_beta.to(logits.dtype).transpose(0, 1).flatten(1).unsqueeze(0)
        return crowd_mixture_nll(
            joint, stored, as_one(annotations), normalization="softmax", weight=weight, reduction=reduction
        )

    @torch.no_grad()
    def log_probs(self, log_f: Tensor, annotations: Annotations) -> Tensor:
        """``log p_m(y_n | x_i)`` of every annotation and group, ``[nnz, M]``."""
        return group_log_probs(log_f, whole(self.log_beta).to(log_f.dtype).log_softmax(1), annotations)

    def probs(self) -> Tensor:
        """``[M, C, K]``, detached: β, as users see it."""
        return whole(self.log_beta).softmax(1).transpose(1, 2).contiguous()

    def weights(self) -> Tensor:
        """``[M]``, detached: α (with a gate, that of an item with features 0)."""
        return whole(self.log_alpha).softmax(0)

    @override
    def extra_repr(self) -> str:
        return str(tuple(self.log_beta.shape))
