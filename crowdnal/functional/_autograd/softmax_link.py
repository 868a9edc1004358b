"""Softmax link: cross-entropy of softmax(h_n), the loss of CrowdLayer, CoNAL and CCC.

h_n = scores_i W_r [+ shared_i], or mixing_n shared_i + (1 - mixing_n) scores_i W_r.

One op forward, one backward; the backward is a Function too, whose own derivative is written with the primitives. Of a
scalar loss the gradients come with the loss (`SoftmaxStep`): it is linear in its upstream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crowdnal import reference
from crowdnal.functional._autograd._function import OpFunction, VmapBatch, add
from crowdnal.functional._autograd._prior import PlainPrior
from crowdnal.functional._autograd._step import StepFunction, StepLoss
from crowdnal.functional._autograd.mix import mix, mix_annotators, mix_items
from crowdnal.functional.segments import sum_by_item
from crowdnal.ops import softmax_link as ops


class _Inputs(NamedTuple):
    """One per input that h depends on: tangents, cotangents, whether they are needed."""

    scores: Any
    confusion: Any
    shared: Any
    mixing: Any

    @classmethod
    def among(cls, arguments: Any) -> _Inputs:
        return cls(arguments.scores, arguments.confusion, arguments.shared, arguments.mixing)

    @classmethod
    def needed(cls, arguments: Any) -> _Inputs:
        """Of the backward op."""
        a = arguments
        return cls(a.need_scores, a.need_confusion, a.need_shared, a.need_mixing)

    def where(self, needed: _Inputs) -> _Inputs:
        """None for what is not needed."""
        return _Inputs(*(value if need else None for value, need in zip(self, needed, strict=True)))


class SoftmaxLink(OpFunction):
    """(loss [], nll [nnz], probs [nnz, K]); see `crowdnal.reference.softmax_link`."""

    op = ops.softmax_link

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps inputs and outputs only, so that second order is exact."""
        _, nll, probs = output
        ctx.mark_non_differentiable(probs)
        ctx.set_materialize_grads(False)
        SoftmaxLink.keep(ctx, inputs, nll, probs)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_nll: Tensor | None, _: Tensor | None) -> Any:
        """One fused op; the gradient of a weight is the nll it multiplies."""
        (a, nll, probs), need = SoftmaxLink.kept(ctx), SoftmaxLink.needs(ctx)
        if grad_loss is None and grad_nll is None:
            return ops.softmax_link.gradients()
        dscores, dconfusion, dshared, dmixing = ops.softmax_link_backward(
            grad_loss=grad_loss, grad_nll=grad_nll, **a._asdict(), probs=probs, need_scores=need.scores,
            need_confusion=need.confusion, need_shared=need.shared, need_mixing=need.mixing,
        )  # fmt: skip
        dweight = None
        if need.weight and grad_loss is not None:
            dweight = reference.upstream(grad_loss, None, None, nll, a.mean) * nll
        return ops.softmax_link.gradients(
            scores=dscores if need.scores else None,
            confusion=dconfusion if need.confusion else None,
            shared=dshared if need.shared else None,
            mixing=dmixing if need.mixing else None,
            weight=dweight,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """d nll = (softmax(h) - onehot) . dh."""
        (a, *_), tangent = SoftmaxLink.kept(ctx), ops.softmax_link.arguments(*tangents)
        link = _Link(a)
        _, nll, probs = reference.cross_entropy(link.value(), a.weight, a.label, a.mean)
        h_t = link.tangent(_Inputs.among(tangent))
        nll_t = torch.zeros_like(nll) if h_t is None else (reference.residual(probs, a.label) * h_t).sum(1)
        total_t = reference.reduce(nll_t, a.weight, a.mean)
        if tangent.weight is not None:
            total_t = total_t + reference.reduce(nll, tangent.weight, a.mean)
        return total_t, nll_t, None

    @staticmethod
    def vmap_op(batch: VmapBatch) -> Any:
        """The weights are left to `VmapBatch.loss`: each problem has a loss of its own."""
        folded = batch.fold("scores", "shared", "mixing", "label", matrices="confusion")
        nll, probs = map(batch.split, batch.op.overload(*folded._replace(weight=None, mean=False))[1:])
        return (batch.loss(nll), nll, probs), (0, 0, 0)


class SoftmaxLinkBackward(OpFunction):
    """Gradients of `SoftmaxLink` for scores, confusion, shared and mixing; of no use where a `need_` is False."""

    op = ops.softmax_link_backward

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the inputs, not `probs`: it is a function of them."""
        ctx.set_materialize_grads(False)
        SoftmaxLinkBackward.keep(ctx, inputs, without=["probs"])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Derivative of sum_n u_n (softmax(h_n) - onehot) . dh_n, dh the change of h along the cotangents."""
        (a,) = SoftmaxLinkBackward.kept(ctx)
        link = _Link(a)
        cotangent = _Inputs(*cotangents).where(_Inputs.needed(a))
        h_c = link.tangent(cotangent)
        if h_c is None:
            return ops.softmax_link_backward.gradients()
        _, _, probs = reference.cross_entropy(link.value(), a.weight, a.label, a.mean)
        u = reference.upstream(a.grad_loss, a.grad_nll, a.weight, probs, a.mean)
        residual = reference.residual(probs, a.label)
        g, q = u.unsqueeze(1) * residual, _curvature(u, probs, h_c)
        second = link.second_order(g, q, cotangent, _Inputs.among(SoftmaxLinkBackward.needs(ctx)))
        du = (residual * h_c).sum(1)
        dweight = None
        if a.weight is not None and a.grad_loss is not None:
            dweight = reference.upstream(a.grad_loss, None, None, du, a.mean) * du
        return ops.softmax_link_backward.gradients(
            grad_loss=None if a.grad_loss is None else reference.reduce(du, a.weight, a.mean),
            grad_nll=None if a.grad_nll is None else du,
            **second._asdict(),
            weight=dweight,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The same second derivative, along the tangents."""
        (a,), tangent = SoftmaxLinkBackward.kept(ctx), ops.softmax_link_backward.arguments(*tangents)
        link, inputs_t = _Link(a), _Inputs.among(tangent)
        _, _, probs = reference.cross_entropy(link.value(), a.weight, a.label, a.mean)
        u = reference.upstream(a.grad_loss, a.grad_nll, a.weight, probs, a.mean)
        u_t = reference.upstream(tangent.grad_loss, tangent.grad_nll, a.weight, probs, a.mean)
        if tangent.weight is not None:
            u_t = u_t + reference.upstream(a.grad_loss, None, tangent.weight, probs, a.mean)
        residual = reference.residual(probs, a.label)
        q = u_t.unsqueeze(1) * residual
        h_t = link.tangent(inputs_t)
        if h_t is not None:
            q = q + _curvature(u, probs, h_t)
        out = link.second_order(u.unsqueeze(1) * residual, q, inputs_t, _Inputs.needed(a))
        return tuple(e if o is None else o for o, e in zip(out, link.empty(q), strict=True))

    @staticmethod
    def vmap_op(batch: VmapBatch) -> Any:
        """The weights and the gradient of each problem's loss are folded into that of nll."""
        share, probs = not batch.arguments.need_confusion, batch.front("probs")
        folded = batch.fold("scores", "shared", "mixing", "label", "probs", matrices="confusion", share=share)
        upstream = batch.upstream(probs)
        return batch.run(folded._replace(grad_loss=None, grad_nll=upstream, weight=None, mean=False)), (0, 0, 0, 0)


class SoftmaxStep(StepFunction):
    """(loss [], nll [nnz], gradients for an upstream of 1); see `crowdnal.reference.softmax_link_step`."""

    op, link, inputs = ops.softmax_link_step, SoftmaxLink, _Inputs._fields
    prior = PlainPrior(
        lambda matrices, a: reference.softmax_rows(matrices, a.common),
        lambda matrices, grad, a: reference.softmax_rows_vjp(matrices, a.common, grad),
        dim=1,
    )

    @classmethod
    def explicit(cls, arguments: Any) -> Any:
        """With the shared term that what is common stands for."""
        a = arguments
        if a.shared is not None or a.common is None:
            return a
        return a._replace(shared=reference.common_scores(a.scores, a.common))

    @classmethod
    def _of_two_ops(cls, arguments: Any, need: Any, *upstreams: Tensor | None) -> dict[str, Tensor | None]:
        a, whole = arguments, cls.explicit(arguments)
        if whole is a:
            return super()._of_two_ops(a, need, *upstreams)
        found = super()._of_two_ops(whole, need._replace(shared=need.scores), *upstreams)
        shared = found.pop("shared")
        if need.scores and shared is not None:
            found["scores"] = add(found["scores"], reference.common_scores_vjp(a.scores, a.common, shared))
        return found


def _is_worth_scaling(inputs: Sequence[Any]) -> bool:
    """Whether gradients made with the loss gain on CUDA, where a backward pass scales them by what no host knows.

    They must be few beside the probabilities [nnz, K] that the two ops write once and read twice, and of matrices for
    which there is a pass (`fits_step`).
    """
    confusion, annotator = inputs[1], inputs[_ANNOTATOR]
    return max(confusion.shape[1:]) <= 32 and confusion.numel() <= annotator.shape[0] * confusion.shape[2]


_ANNOTATOR = ops.softmax_link.arguments._fields.index("annotator")
softmax_loss = StepLoss(SoftmaxStep, _is_worth_scaling)


def _curvature(u: Tensor, probs: Tensor, h_t: Tensor) -> Tensor:
    """u (diag(s) - s s^T) dh, [nnz, K]."""
    return u.unsqueeze(1) * probs * (h_t - (probs * h_t).sum(1, keepdim=True))


class _Link:
    """h [nnz, K] and its first and second derivatives, from the primitives."""

    def __init__(self, arguments: Any) -> None:
        self.scores, self.confusion, self.shared, self.mixing = _Inputs.among(arguments)
        self.index, self.item = arguments.index, arguments.item

    def value(self) -> Tensor:
        return reference.blend(self._own(), self.shared, self.mixing, self.item)

    def _own(self) -> Tensor:
        return mix(self.scores, self.confusion, self.index)

    def _own_tangent(self, t: _Inputs) -> Any:
        """Change of scores_i W_r."""
        return add(
            None if t.scores is None else mix(t.scores, self.confusion, self.index),
            None if t.confusion is None else mix(self.scores, t.confusion, self.index),
        )

    def _rest(self, rows: Tensor) -> Tensor:
        """rows (1 - mixing)."""
        return rows if self.mixing is None else (1 - self.mixing).unsqueeze(1) * rows

    def tangent(self, t: _Inputs) -> Any:
        """dh; None where no input changes."""
        own, shared = self._own_tangent(t), None if t.shared is None else t.shared[self.item]
        if self.mixing is not None and shared is not None:
            shared = self.mixing.unsqueeze(1) * shared
        mixed = None if t.mixing is None else t.mixing.unsqueeze(1) * (self.shared[self.item] - self._own())
        return add(None if own is None else self._rest(own), shared, mixed)

    def second_order(self, g: Tensor, q: Tensor, t: _Inputs, needed: _Inputs) -> _Inputs:
        """Change of the gradients of sum_n g_n . h_n when g changes by q, and the inputs by their tangents."""
        moved = None if t.mixing is None else t.mixing.unsqueeze(1) * g
        rows, g_rest = add(self._rest(q), None if moved is None else -moved), self._rest(g)
        scores = confusion = shared = mixing = None
        if needed.scores:
            other = None if t.confusion is None else mix_items(g_rest, t.confusion, self.index)
            scores = add(mix_items(rows, self.confusion, self.index), other)
        if needed.confusion:
            count = self.confusion.shape[0]
            other = None if t.scores is None else mix_annotators(t.scores, g_rest, self.index, count)
            confusion = add(mix_annotators(self.scores, rows, self.index, count), other)
        if needed.shared:
            shared = sum_by_item(add(q if self.mixing is None else self.mixing.unsqueeze(1) * q, moved), self.index)
        if needed.mixing:
            own_t = self._own_tangent(t)
            change = add(None if t.shared is None else t.shared[self.item], None if own_t is None else -own_t)
            mixing = (q * (self.shared[self.item] - self._own())).sum(1)
            mixing = add(mixing, None if change is None else (g * change).sum(1))
        return _Inputs(scores, confusion, shared, mixing)

    def empty(self, rows: Tensor) -> _Inputs:
        """What stands for the gradients that are not needed."""
        return _Inputs(
            self.scores.new_zeros(0, self.scores.shape[1]),
            self.scores.new_zeros(0, *self.confusion.shape[1:]),
            rows.new_zeros(0, rows.shape[1]),
            rows.new_zeros(0),
        )
