"""Low-rank confusions, for many classes and annotators: nothing of size R x C x K is stored or trained.

Modules like those of :mod:`crowdnal.confusion`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from crowdnal.confusion._full import root, whole
from crowdnal.data import Annotations
from crowdnal.functional import Reduction, crowd_mixture_nll
from crowdnal.functional.reduction import reduce
from crowdnal.functional.segments import gather_rows, index_of, mix_indexed, mix_rows

CELLS = 1 << 24
"""How many cells of low-rank matrices are built at a time where none of them is to be kept."""


class BlockwiseConfusion(nn.Module):
    """Matrices of scores whose rows' softmax is shown, of some annotators at a time where they would not all fit."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(R, C, K)."""
        raise NotImplementedError

    def matrices(self, annotators: Tensor | slice) -> Tensor:
        """``[r, C, K]``, detached: the scores of these annotators, at least in float32."""
        raise NotImplementedError

    def probs(self) -> Tensor:
        """``[R, C, K]``: softmax of each row. Builds what the loss does without."""
        return self.matrices(slice(None)).softmax(-1)

    def diagonals(self) -> Tensor:
        """``[R, min(C, K)]``: the diagonal of :meth:`probs`, of some annotators at a time."""
        blocks = torch.arange(self.shape[0], device=next(self.parameters()).device).split(self._block())
        return torch.cat([self.matrices(block).softmax(-1).diagonal(dim1=1, dim2=2) for block in blocks])

    @torch.no_grad()
    def log_likelihoods(self, annotations: Annotations) -> Tensor:
        """``[nnz, C]``: log-probability of each observed label under each true class, some annotators at a time."""
        index, label, first = annotations.active_index, annotations.label, 0
        dtype = torch.promote_types(next(self.parameters()).dtype, torch.float32)
        rows = torch.empty(len(label), self.shape[1], dtype=dtype, device=label.device)
        for block in annotations.active_annotators.split(self._block()):
            mine = ((index >= first) & (index < first + len(block))).nonzero().squeeze(1)
            rows[mine] = self.matrices(block).log_softmax(-1)[index[mine] - first, :, label[mine]]
            first += len(block)
        return rows

    def _block(self) -> int:
        _, num_classes, num_labels = self.shape
        return max(CELLS // (num_classes * max(num_classes, num_labels)), 1)


class LowRankConfusion(BlockwiseConfusion):
    """A diagonal plus a matrix of low rank per annotator for the softmax link: ``W_r = diag(d_r) + U_r V_r``.

    Init: ``diagonal [R, min(C, K)]`` ``scale``, ``left [R, C, rank]`` random (deviation ``spread / √rank``), ``right
    [R, rank, K]`` 0, so that W is ``scale`` times the (rectangular) identity. R (C + K) (rank + 1) numbers at most
    instead of R C K, and no W is built for the scores of annotations.
    """

    def __init__(
        self, num_annotators: int, num_classes: int, num_labels: int, *,
        rank: int, scale: float = 1.0, spread: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scale, self.spread = scale, spread
        self.diagonal = nn.Parameter(torch.empty(num_annotators, min(num_classes, num_labels)))
        self.left = nn.Parameter(torch.empty(num_annotators, num_classes, rank))
        self.right = nn.Parameter(torch.empty(num_annotators, rank, num_labels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the parameters to their init (another draw of it)."""
        with torch.no_grad():
            self.diagonal.fill_(self.scale)
            # at 0 like the other factor neither would get a gradient
            self.left.normal_(std=self.spread * self.left.shape[2] ** -0.5)
            self.right.zero_()

    def scores(self, probs: Tensor, annotations: Annotations) -> Tensor:
        """Scores of the observed labels ``[nnz, K]`` given ``probs [B, C]``; nothing larger is built."""
        annotator, order = annotations.annotator, annotations.order
        kept, num_labels = self.diagonal.shape[1], self.right.shape[2]
        left, right = self.left.to(probs.dtype), self.right.to(probs.dtype)
        h = gather_rows(probs, annotations.item, torch.arange(len(annotator), device=annotator.device))[:, :kept]
        h = h * gather_rows(self.diagonal.to(h.dtype), annotator, order)
        low = mix_rows(mix_indexed(probs, left, index_of(annotations)), right, annotator, order)
        return F.pad(h, (0, num_labels - kept)) + low

    def nll(
        self,
        probs: Tensor,
        annotations: Annotations,
        weight: Tensor | None,
        reduction: Reduction,
        *,
        shared: Tensor | None = None,
        mixing: Tensor | None = None,
    ) -> Tensor:
        """As `crowdnal.confusion.FreeConfusion.nll`."""
        h = self.scores(probs, annotations)
        if shared is not None and mixing is not None:
            every = torch.arange(len(h), device=h.device)
            h = h.lerp(gather_rows(shared.to(h.dtype), annotations.item, every), mixing.to(h.dtype).unsqueeze(1))
        return reduce(F.cross_entropy(h, annotations.label, reduction="none"), annotations, weight, reduction)

    def distances(self, common: Tensor, annotators: Tensor | None = None) -> Tensor:
        """As `crowdnal.confusion.FreeConfusion.distances`, from products of the factors: no W is built."""
        d, left, right = (
            part if annotators is None else part[annotators] for part in (self.diagonal, self.left, self.right)
        )
        dtype = torch.promote_types(d.dtype, torch.float32)
        d, left, right, common = d.to(dtype), left.to(dtype), right.to(dtype), common.to(dtype)
        kept = d.shape[1]
        off = common - F.pad(common.diagonal().diag(), (0, common.shape[1] - kept, 0, common.shape[0] - kept))
        apart = d - common.diagonal()
        # ‖(diag(d) - diag G) + (UV - G's rest)‖²: no difference of large numbers while both are nearly diagonal
        square = apart.square().sum(1) + off.square().sum()
        square = square + ((left.mT @ left) * (right @ right.mT)).sum((1, 2))
        cross = apart * (left[:, :kept] * right[:, :, :kept].mT).sum(2)
        return root(square + 2 * cross.sum(1) - 2 * ((left.mT @ off) * right).sum((1, 2)))

    def row(self, k: int) -> Tensor:
        """``[R, 1, K]``, detached: row k of every matrix."""
        row = whole(self.left)[:, k : k + 1] @ whole(self.right)
        if k < self.diagonal.shape[1]:
            row[:, 0, k] += whole(self.diagonal)[:, k]
        return row

    @property
    def shape(self) -> tuple[int, int, int]:
        """(R, C, K)."""
        return self.left.shape[0], self.left.shape[1], self.right.shape[2]

    def matrices(self, annotators: Tensor | slice) -> Tensor:
        """``[r, C, K]``, detached: W of these annotators."""
        scores = whole(self.left)[annotators] @ whole(self.right)[annotators]
        scores.diagonal(dim1=1, dim2=2).add_(whole(self.diagonal)[annotators])
        return scores

    def times(self, rows: Tensor, annotators: Tensor | slice) -> Tensor:
        """``rows @ W``, detached, of these annotators: ``[r, n, K]`` for rows ``[r, n, C]``."""
        d, left, right = (whole(part)[annotators] for part in (self.diagonal, self.left, self.right))
        kept = d.shape[1]
        return F.pad(rows[..., :kept] * d.unsqueeze(1), (0, right.shape[2] - kept)) + (rows @ left) @ right

    @override
    def extra_repr(self) -> str:
        return f"{self.shape}, rank={self.left.shape[2]}"


class LowRankMixture(nn.Module):
    """Row-stochastic matrix per annotator for the mixture link: a diagonal plus a mixture of ``rank`` distributions.

    ``A_r[k, y] = a_r[k] 1[y = k] + (1 - a_r[k]) Σ_m s_r[k, m] b_r[m, y]``: an annotator who sees class k names it with
    probability a; else one of ``rank`` response profiles answers, which k chooses. ``a`` is the sigmoid of ``diagonal
    [R, min(C, K)]`` (0 for a class that is no label), ``s`` the softmax over m of ``choice [R, rank, C]``, ``b`` the
    softmax over y of ``profile [R, rank, K]``. Init: a = 0.95, s uniform, profiles normal of deviation 0.1 (equal
    ones would stay equal). An annotation costs (C + K) rank, and no A is built.
    """

    START = 3.0

    def __init__(self, num_annotators: int, num_classes: int, num_labels: int, *, rank: int) -> None:
        super().__init__()
        self.diagonal = nn.Parameter(torch.empty(num_annotators, min(num_classes, num_labels)))
        self.choice = nn.Parameter(torch.empty(num_annotators, rank, num_classes))
        self.profile = nn.Parameter(torch.empty(num_annotators, rank, num_labels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the parameters to their init (another draw of it)."""
        with torch.no_grad():
            self.diagonal.fill_(self.START)
            self.choice.zero_()
            self.profile.normal_(std=0.1)

    def nll(self, log_probs: Tensor, annotations: Annotations, weight: Tensor | None, reduction: Reduction) -> Tensor:
        """``-log Σ_k p_i[k] A_r[k, y]`` of each label, in log space: as `NormalizedConfusion.nll`."""
        dtype, annotator, order, label = log_probs.dtype, annotations.annotator, annotations.order, annotations.label
        (_, kept), (_, rank, num_labels) = self.diagonal.shape, self.profile.shape
        log_p = gather_rows(log_probs, annotations.item, torch.arange(len(label), device=label.device))
        logit = gather_rows(self.diagonal.to(dtype), annotator, order)
        named = (log_p[:, :kept] + F.logsigmoid(logit)).gather(1, label.clamp(max=kept - 1).unsqueeze(1)).squeeze(1)
        named = named.where(label < kept, -torch.inf)
        rest = log_p + F.pad(F.logsigmoid(-logit), (0, log_p.shape[1] - kept))
        # the profiles are labels of a mixture of their own: log Σ_k p (1 - a) s of each, for each annotation
        profiles = -crowd_mixture_nll(
            rest, self.choice, annotations.each_label(rank), normalization="softmax", reduction="none"
        )
        rows = gather_rows(self.profile.to(dtype).flatten(1), annotator, order).view(-1, rank, num_labels)
        answers = rows.log_softmax(-1).gather(2, label.view(-1, 1, 1).expand(-1, rank, 1)).squeeze(2)
        # not logaddexp, whose second derivatives are NaN where one side is negligible
        log_q = torch.cat([named.unsqueeze(1), profiles.view(-1, rank) + answers], 1).logsumexp(1)
        return reduce(-log_q, annotations, weight, reduction)

    def traces(self, annotators: Tensor | None = None) -> Tensor:
        """Differentiable trace of every (given) annotator's matrix, ``[R]``; of min(C, K) cells."""
        return self._diagonals(*(p if annotators is None else p[annotators] for p in self._parts())).sum(-1)

    def square_norms(self) -> Tensor:
        """Differentiable ``‖A_r‖²`` (Frobenius) of every annotator's matrix, ``[R]``; nothing of its size is built."""
        a, s, b = self._activated(*self._parts())
        kept = a.shape[1]
        mixed = s * F.pad(1 - a, (0, s.shape[2] - kept), value=1.0).unsqueeze(1)
        cross = a * (mixed[:, :, :kept] * b[:, :, :kept]).sum(1)
        return a.square().sum(1) + 2 * cross.sum(1) + ((mixed @ mixed.mT) * (b @ b.mT)).sum((1, 2))

    def gram(self, weights: Tensor, annotators: Tensor | None = None) -> Tensor:
        """Differentiable ``Σ_r weights_r A_r A_rᵀ`` ``[C, C]`` of all, or of these annotators; no A is built."""
        a, s, b = self._activated(*(p if annotators is None else p[annotators] for p in self._parts()))
        weights, kept, num_classes = weights.to(a.dtype), a.shape[1], s.shape[2]
        a = F.pad(a, (0, num_classes - kept))
        mixed = s * (1 - a).unsqueeze(1) * weights[:, None, None]  # [R, rank, C], of A = diag(a) + mixedᵀ b / weights
        named = a.unsqueeze(1) * F.pad(b[:, :, :kept], (0, num_classes - kept))
        half = mixed.flatten(0, 1).T @ named.flatten(0, 1)
        low = mixed.flatten(0, 1).T @ ((b @ b.mT) @ (s * (1 - a).unsqueeze(1))).flatten(0, 1)
        return (weights @ a.square()).diag() + half + half.T + low

    def diagonals(self) -> Tensor:
        """``[R, min(C, K)]``: the diagonal of :meth:`probs`."""
        return self._diagonals(*map(whole, self._parts()))

    def probs(self) -> Tensor:
        """``[R, C, K]``, as users see it. Builds what the likelihood does without."""
        a, s, b = self._activated(*map(whole, self._parts()))
        num_classes, kept = s.shape[2], a.shape[1]
        mixed = (s * F.pad(1 - a, (0, num_classes - kept), value=1.0).unsqueeze(1)).transpose(1, 2) @ b
        mixed.diagonal(dim1=1, dim2=2).add_(a)
        return mixed

    @torch.no_grad()
    def log_likelihoods(self, annotations: Annotations) -> Tensor:
        """``[nnz, C]``: log-probability of each observed label under each true class."""
        diagonal, choice, profile = map(whole, self._parts())
        annotator, label, kept = annotations.annotator, annotations.label, diagonal.shape[1]
        log_s, log_b = choice.log_softmax(1), profile.log_softmax(2)
        rows = torch.full((len(label), choice.shape[2]), -torch.inf, dtype=choice.dtype, device=choice.device)
        for m in range(choice.shape[1]):
            rows = rows.logaddexp(log_s[annotator, m] + log_b[annotator, m, label].unsqueeze(1))
        rows[:, :kept] += F.logsigmoid(-diagonal)[annotator]
        same = (label < kept).nonzero().squeeze(1)
        named = F.logsigmoid(diagonal)[annotator[same], label[same]]
        rows[same, label[same]] = rows[same, label[same]].logaddexp(named)
        return rows

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.diagonal, self.choice, self.profile

    @staticmethod
    def _activated(diagonal: Tensor, choice: Tensor, profile: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(diagonal.dtype, torch.float32)
        return diagonal.to(dtype).sigmoid(), choice.to(dtype).softmax(1), profile.to(dtype).softmax(2)

    def _diagonals(self, *parts: Tensor) -> Tensor:
        a, s, b = self._activated(*parts)
        return a + (1 - a) * (s[:, :, : a.shape[1]] * b[:, :, : a.shape[1]]).sum(1)

    @override
    def extra_repr(self) -> str:
        return f"{(len(self.choice), self.choice.shape[2], self.profile.shape[2])}, rank={self.choice.shape[1]}"
