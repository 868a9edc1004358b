"""Losses whose gradients come with them: one op where a training step else takes two.

A scalar loss is linear in its upstream, so its gradients for an upstream of 1 are made while the matrices are at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from crowdnal import reference
from crowdnal.functional._autograd._function import OpFunction, VmapBatch, add
from crowdnal.functional._autograd._prior import PlainPrior
from crowdnal.functional.prior import DirichletPrior, is_one


class StepFunction(OpFunction):
    """(loss [], nll, gradients for an upstream of 1): base of the Functions of the ops ``<link>_step``.

    The gradients are handed to the first backward pass; a second one over the graph runs the op again, with the same
    bits. A pass that is differentiated or batched (`is_grads_batched`), or comes from nll, takes the two ops of `link`:
    its bits may differ, because these sum in another order.

    Attributes:
        link: the Function of the loss alone. The op has its arguments, then a ``need_`` for each of `inputs`.
        inputs: names of the arguments that the op makes gradients of, in their order.
        weighs_nll: whether the loss sums weight_n nll_n; else the gradient of a weight takes the two ops.
        prior: what the two ops leave out if the op takes a prior: behind the label, before what is no tensor.
        places: of `inputs` among the arguments.
        weight: place of the weight.
    """

    link: ClassVar[type[OpFunction]]
    inputs: ClassVar[tuple[str, ...]]
    weighs_nll: ClassVar[bool] = True
    prior: ClassVar[PlainPrior | None] = None
    places: ClassVar[tuple[int, ...]]
    weight: ClassVar[int]

    def __init_subclass__(cls) -> None:
        fields = cls.op.arguments._fields
        cls.places, cls.weight = tuple(map(fields.index, cls.inputs)), fields.index("weight")
        super().__init_subclass__()

    @classmethod
    def setup_context(cls, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the inputs, and the gradients until they are asked for."""
        ctx.gradients = output[2:]
        ctx.mark_non_differentiable(*ctx.gradients)
        ctx.set_materialize_grads(False)
        cls.keep(ctx, inputs, output[1])

    @classmethod
    def backward(cls, ctx: Any, grad_loss: Tensor | None, grad_nll: Tensor | None, *_: Tensor | None) -> Any:
        """The gradients times grad_loss, in place, and on the CPU not at all where it is 1."""
        need, out = ctx.needs_input_grad, [None] * len(ctx.needs_input_grad)
        if grad_loss is None and grad_nll is None:
            return tuple(out)
        if grad_loss is None or grad_nll is not None or not _is_last(grad_loss):
            return cls._by_two_ops(ctx, grad_loss, grad_nll)
        if need[cls.weight] and not (cls.weighs_nll and cls._without_prior(ctx)):
            return cls._by_two_ops(ctx, grad_loss, grad_nll)
        ready, ctx.gradients = ctx.gradients, None
        if ready is None:
            ready = cls.op(*cls.kept(ctx)[0])[2:]
        if not is_one(grad_loss):
            ready = [gradient.mul_(grad_loss) for gradient in ready]
        for place, gradient in zip(cls.places, ready, strict=True):
            if need[place]:
                out[place] = gradient
        if need[cls.weight]:
            a, nll = cls.kept(ctx)
            out[cls.weight] = reference.upstream(grad_loss, None, None, nll, a.mean) * nll
        return tuple(out)

    @classmethod
    def _by_two_ops(cls, ctx: Any, *upstreams: Tensor | None) -> Any:
        return cls.op.gradients(**cls._of_two_ops(cls.kept(ctx)[0], cls.needs(ctx), *upstreams))

    @classmethod
    def _of_two_ops(cls, arguments: Any, need: Any, *upstreams: Tensor | None) -> dict[str, Tensor | None]:
        """Gradients by name."""
        names = cls.link.op.arguments._fields
        inputs = [getattr(arguments, name) for name in names]
        kept, outputs = _Kept(tuple(getattr(need, name) for name in names)), cls.link.run(*inputs)
        cls.link.setup_context(kept, tuple(inputs), outputs)
        nothing = (None,) * (len(outputs) - len(upstreams))
        found = dict(zip(names, cls.link.backward(kept, *upstreams, *nothing), strict=True))
        if cls.prior is not None and arguments.prior is not None and upstreams[0] is not None:
            confusion, weight = cls.prior.gradients(arguments, upstreams[0], need_weight=need.weight)
            found["confusion"] = add(found["confusion"], confusion) if need.confusion else None
            found["weight"] = add(found["weight"], weight)
        return found

    @classmethod
    def explicit(cls, arguments: Any) -> Any:
        """The arguments, with all that the link needs."""
        return arguments

    @classmethod
    def _without_prior(cls, ctx: Any) -> bool:
        return cls.prior is None or cls.kept(ctx)[0].prior is None

    @classmethod
    def jvp(cls, ctx: Any, *tangents: Any) -> Any:
        """Refused: `StepLoss` takes `link` in forward mode."""
        raise RuntimeError(f"{cls.op.name} has no forward mode: take {cls.link.op.name}")

    @classmethod
    def vmap_op(cls, batch: VmapBatch) -> Any:
        """Refused: `StepLoss` takes `link` under `torch.func`."""
        raise RuntimeError(f"{cls.op.name} has no vmap rule: take {cls.link.op.name}")


class StepLoss:
    """The loss [] of a step's link, its gradients with it where that is possible and of use."""

    def __init__(self, step: type[StepFunction], on_cuda: Callable[[Sequence[Any]], bool] | None = None) -> None:
        self.on_cuda = on_cuda  # whether it is of use there; compiled steps take the two ops
        self.step, self.link, self.prior, self.explicit = step.op, step.link.op, step.prior, step.explicit
        self.places, self.weight, self.weighs_nll = step.places, step.weight, step.weighs_nll
        self.tensors = step.link.op.num_tensors
        of_prior = step.op.arguments._fields[self.tensors : step.op.num_tensors]
        parts = ("prior", *DirichletPrior._fields[1:])  # as the op calls them
        self.of_prior = [parts.index(name) for name in of_prior]
        self.nothing = (None,) * len(of_prior)

    def __call__(self, *inputs: Any, prior: DirichletPrior | None = None) -> Tensor:
        """Of the arguments of the link, and of a prior whose sizes are as the op takes them."""
        tensors, rest = inputs[: self.tensors], inputs[self.tensors :]
        given = self.nothing if prior is None else tuple(prior[part] for part in self.of_prior)
        if self._is_of_use(inputs) and _records_only():
            needed = [(tensor := inputs[place]) is not None and tensor.requires_grad for place in self.places]
            weight = inputs[self.weight]
            weighs = self.weighs_nll and prior is None
            if any(needed) and (weighs or weight is None or not weight.requires_grad):
                return self.step(*tensors, *given, *rest, *needed)[0]
        if prior is None or self.prior is None:
            return self.link(*inputs)[0]
        arguments = self.explicit(self.step.arguments(*tensors, *given, *rest, *(False,) * len(self.places)))
        return self.link(*arguments[: self.tensors], *rest)[0] + self.prior.loss(arguments)

    def _is_of_use(self, inputs: Sequence[Any]) -> bool:
        if not inputs[0].is_cuda:
            return bool(inputs[0].device.type == "cpu")
        return self.on_cuda is not None and not torch.compiler.is_compiling() and self.on_cuda(inputs)


class _Kept:
    """The context of a Function whose `backward` is called directly."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def _records_only() -> bool:
    """Whether gradients are recorded, and nothing else is done to what is computed."""
    return torch.is_grad_enabled() and forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active()


def _is_last(upstream: Tensor) -> bool:
    """Whether nothing is done to the results of a backward pass, and it is no batch of several."""
    func = torch._C._functorch
    others = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
    return not others and not func.is_legacy_batchedtensor(upstream)
