"""Where an annotation's noise comes from, from its annotator and its item: the auxiliary network of CoNAL."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from crowdnal._utils.layers import linear, set_input_size
from crowdnal._utils.options import check_integer
from crowdnal.data import Annotations
from crowdnal.functional.segments import Index, index_of, mix_indexed
from crowdnal.functional.sparse import compact


class NoiseSource(nn.Module):
    """``u_r · v_i`` of every annotation ``[nnz]``, the logit of ω (Chu et al. 2021, equation 3).

    u is a linear map of an annotator's features, or of its one-hot identity (then ``annotators [R, d, 1]`` holds one
    for each), with a bias, and normalised; v one linear layer on the item's features (``hidden_dim=None``) or
    two, normalised unless ``normalize_items=False``. Init as of ``torch.nn.Linear``. The arguments are those of
    :class:`crowdnal.objectives.CoNAL`.
    """

    features: Tensor | None

    def __init__(
        self, num_annotators: int, feature_dim: int | None, embedding_dim: int, hidden_dim: int | None,
        normalize_items: bool, annotator_features: Tensor | None, sparse_grad: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        first_dim = embedding_dim if hidden_dim is None else hidden_dim
        check_integer(1, embedding_dim=embedding_dim, hidden_dim=first_dim)
        if feature_dim is not None:
            check_integer(1, feature_dim=feature_dim)
        if annotator_features is not None:
            annotator_features = checked_annotator_features(annotator_features, num_annotators)
        self.normalize_items = normalize_items
        self.sparse_grad = sparse_grad
        self.register_buffer("features", annotator_features)
        inputs = num_annotators if annotator_features is None else annotator_features.shape[1]
        self.annotators = nn.Parameter(torch.empty(inputs, embedding_dim, 1))
        self.bias = nn.Parameter(torch.empty(embedding_dim))
        self.hidden = nn.LazyLinear(first_dim) if feature_dim is None else nn.Linear(feature_dim, first_dim)
        self.items = None if hidden_dim is None else nn.Linear(hidden_dim, embedding_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters anew."""
        bound = 1 / math.sqrt(self.annotators.shape[0])
        for parameter in (self.annotators, self.bias):
            nn.init.uniform_(parameter, -bound, bound)
        self.hidden.reset_parameters()  # nothing where the size is not known yet
        if self.items is not None:
            self.items.reset_parameters()

    def set_feature_dim(self, feature_dim: int) -> None:
        """Makes the parameters that depend on the length of an item's features; an error if it is another one."""
        set_input_size(self.hidden, feature_dim)

    def forward(self, features: Tensor, annotations: Annotations) -> Tensor:
        """Logits ``[nnz]`` of ω, for features ``[B, ...]`` (flattened), in their dtype."""
        features = features.flatten(1)
        self.set_feature_dim(features.shape[1])
        items = linear(self.hidden, features)
        if self.items is not None:
            items = linear(self.items, items)
        if self.normalize_items:
            items = F.normalize(items, dim=1)
        annotators, index = self._annotators(annotations, items.dtype)
        return mix_indexed(items, annotators, index).squeeze(1)

    def _annotators(self, annotations: Annotations, dtype: torch.dtype) -> tuple[Tensor, Index]:
        """u ``[R, d, 1]`` of all annotators (with sparse gradients, those present), and an index that counts them."""
        index = index_of(annotations)
        if self.features is not None:
            features = self.features
            if self.sparse_grad:
                features = features[annotations.active_annotators]
                index = annotations.indptr, annotations.item, annotations.active_index, annotations.order, None
            table = (features.to(dtype) @ self.annotators.squeeze(2).to(dtype)).unsqueeze(2)
        elif self.sparse_grad:
            table, index = compact(self.annotators, annotations)
        else:
            table = self.annotators
        return F.normalize(table.to(dtype) + self.bias.to(dtype).unsqueeze(1), dim=1), index

    @override
    def extra_repr(self) -> str:
        what = "features" if self.features is not None else "identities"
        return f"annotator {what} {tuple(self.annotators.shape)}, normalize_items={self.normalize_items}"


def checked_annotator_features(features: Tensor, num_annotators: int) -> Tensor:
    """A copy of the features ``[R, F]`` of annotators; a ValueError where they are none."""
    features = torch.as_tensor(features).detach()
    if features.dim() != 2 or features.shape[0] != num_annotators or features.shape[1] == 0:
        raise ValueError(
            f"annotator_features has shape {list(features.shape)} but must be [R, F] with R={num_annotators}: "
            "one row per annotator"
        )
    if not features.is_floating_point() or not bool(features.isfinite().all()):
        raise ValueError(
            f"annotator_features ({features.dtype}) must be floating point and finite: encode categories, and fill "
            "in what is missing"
        )
    return features.clone()
