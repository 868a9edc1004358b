"""What the op families share: Functions, index tensors, dtypes, shapes, and the rules of `vmap`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from crowdnal import reference
from crowdnal.data import Annotations

Index = tuple[Tensor, Tensor, Tensor, Tensor]
"""indptr [B + 1], item [nnz], annotator [nnz], order [nnz]: what every op takes."""

HALF = (torch.float16, torch.bfloat16)
"""The dtypes that the ops read matrices in beside float32 and float64."""

Normalization = Literal["softmax", "softplus", "none"]
_NORMALIZATIONS = {"none": reference.NONE, "softmax": reference.SOFTMAX, "softplus": reference.SOFTPLUS}


def normalization_kind(normalization: str) -> int:
    """`normalization` of the ops.

    Raises:
        ValueError: if it is unknown.
    """
    if normalization not in _NORMALIZATIONS:
        raise ValueError(f"normalization={normalization!r} is not one of {', '.join(map(repr, _NORMALIZATIONS))}")
    return _NORMALIZATIONS[normalization]


class OpFunction(Function):
    """Base of the Functions. `run` is `apply` without its overhead, which a small batch feels.

    torch inspects the signature of a Function with `setup_context` on every call. Only `torch.func` needs that form, so
    outside its transforms a twin runs whose `forward` sets up the context itself; and where nothing is recorded (as in
    a backward pass that is not differentiated itself) only `forward` does.
    """

    generate_vmap_rule = True
    _twin: type[Function]

    def __init_subclass__(cls) -> None:
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = cls.forward(*inputs)
            cls.setup_context(ctx, inputs, output)
            return output

        members = {
            "forward": staticmethod(forward),
            "backward": staticmethod(cls.backward),
            "jvp": staticmethod(cls.jvp),
        }
        cls._twin = type(cls.__name__, (Function,), members)

    @classmethod
    def run(cls, *inputs: Any) -> Any:
        """As `apply`."""
        if torch._C._are_functorch_transforms_active():
            _refuse_nested_forward_mode()
            return cls.apply(*inputs)
        if not torch.is_grad_enabled() and forward_ad._current_level < 0:
            return cls.forward(*inputs)
        return cls._twin.apply(*inputs)


def _refuse_nested_forward_mode() -> None:
    """torch switches forward mode off, all levels of it, while a Function's own `jvp` runs: a wrong Hessian."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    if sum(level.key() == torch._C._functorch.TransformType.Jvp for level in stack) > 1:
        raise RuntimeError(
            "forward mode inside forward mode (jacfwd of jacfwd) would silently be wrong for a torch Function: use "
            "torch.func.hessian, or jacrev for one of the two"
        )


def call(op: Any, *args: Any) -> Any:
    """A raw op from inside an `OpFunction`, past the Python autograd kernel that is there for direct callers."""
    if torch._C._are_functorch_transforms_active():
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """Keeps tensors for the backward pass, and for tangents if there can be any.

    The same for both: `torch.func` has one list of batch dimensions for what is saved.
    """
    ctx.save_for_backward(*tensors)
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        ctx.save_for_forward(*tensors)


def index_of(annotations: Annotations) -> Index:
    """The index tensors of a batch of annotations."""
    return annotations.indptr, annotations.item, annotations.annotator, annotations.order


def add(*terms: Tensor | None) -> Any:
    """The sum of the terms that are there; None if none is."""
    present = [term for term in terms if term is not None]
    return sum(present[1:], present[0]) if present else None


def promote(*tensors: Tensor | None) -> list[Any]:
    """The tensors in one floating dtype, at least float32 (None stays None)."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    if dtypes == {torch.float32}:
        return list(tensors)
    dtype = torch.float32
    for other in dtypes:
        dtype = torch.promote_types(dtype, other)
    return [tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype) for tensor in tensors]


def promote_beside(confusion: Tensor, *others: Tensor | None) -> list[Any]:
    """As `promote`, but matrices in half precision stay as they are if the rest is float32: the ops read them so."""
    if confusion.dtype not in HALF:
        return promote(confusion, *others)
    others = tuple(promote(*others))
    wide = any(other is not None and other.dtype == torch.float64 for other in others)
    return [confusion.double() if wide else confusion, *others]


def check_shape(name: str, tensor: Tensor, *sizes: int, meaning: str) -> None:
    """Raises ValueError unless `tensor` has exactly these sizes; `meaning` reads like "[num_items, num_classes]"."""
    if tuple(tensor.shape) != sizes:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {meaning} = {sizes}")


def check_confusion(confusion: Tensor, annotations: Annotations, label_dim: int) -> None:
    """Raises ValueError unless confusion is [R, ., .] with the label set of the annotations on `label_dim`."""
    if confusion.dim() != 3 or confusion.shape[0] != annotations.num_annotators:
        raise ValueError(
            f"confusion has shape {tuple(confusion.shape)}, but the annotations have "
            f"num_annotators={annotations.num_annotators}: one matrix an annotator is needed"
        )
    if confusion.shape[label_dim] != annotations.num_classes:
        raise ValueError(
            f"confusion has {confusion.shape[label_dim]} observed labels (dimension {label_dim} of shape "
            f"{tuple(confusion.shape)}), but the annotations have num_classes={annotations.num_classes}"
        )


class VmapBatch:
    """The problems of a `vmap` call laid side by side as one: how the raw ops are batched.

    Items, annotations and (unless they share the matrices that are only read) annotators get offsets.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def front(self, tensor: Tensor, dim: int | None) -> Tensor:
        """The mapped dimension in front; expanded where there is none."""
        return tensor.expand(self.size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

    def rows(self, tensor: Any, dim: int | None) -> Any:
        """[size, n, ...] as [size x n, ...]; None stays None."""
        return None if tensor is None else self.front(tensor, dim).flatten(0, 1)

    def matrices(self, confusion: Tensor, dim: int | None, share: bool = True) -> tuple[Tensor, int]:
        """The matrices of all problems and the offset between problems: 0 if they share one set."""
        if dim is None and share:
            return confusion, 0
        confusion = self.front(confusion, dim)
        return confusion.flatten(0, 1), confusion.shape[1]

    def index(self, index: Sequence[Tensor], dims: Sequence[int | None], num_annotators: int) -> Index:
        """The four index tensors, annotators `num_annotators` apart."""
        indptr, item, annotator, order = (self.front(t, d) for t, d in zip(index, dims, strict=True))
        num_items, nnz = indptr.shape[1] - 1, annotator.shape[1]
        problem = torch.arange(self.size, device=indptr.device).unsqueeze(1)
        annotator, order = (annotator + problem * num_annotators).flatten(), (order + problem * nnz).flatten()
        if num_annotators == 0:
            order = torch.argsort(annotator, stable=True)
        ends = (indptr[:, 1:] + problem * nnz).flatten()
        return torch.cat([ends.new_zeros(1), ends]), (item + problem * num_items).flatten(), annotator, order

    def split(self, tensor: Tensor) -> Tensor:
        """[size x n, ...] as [size, n, ...]."""
        return tensor.reshape(self.size, tensor.shape[0] // self.size, *tensor.shape[1:])

    def loss(self, nll: Tensor, weight: Tensor | None, dim: int | None, mean: bool) -> Tensor:
        """The `loss` output [size] of nll [size, nnz]."""
        total = (nll if weight is None else nll * self.front(weight, dim)).sum(1)
        return total / max(nll.shape[1], 1) if mean else total

    def upstream(self, grads: Sequence[Any], dims: Sequence[Any], nnz: int, like: Tensor, mean: bool) -> Tensor:
        """d output / d nll [size x nnz] from (grad_loss, grad_nll, weight)."""
        grad_loss, grad_nll, weight = (
            None if t is None else self.front(t, d) for t, d in zip(grads, dims, strict=True)
        )
        out = like.new_zeros(self.size, nnz)
        if grad_loss is not None:
            scale = grad_loss.unsqueeze(1) / (max(nnz, 1) if mean else 1)
            out = out + (scale if weight is None else scale * weight)
        return (out if grad_nll is None else out + grad_nll).flatten()
