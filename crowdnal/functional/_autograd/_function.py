"""What the op families share: Functions, index tensors, dtypes, shapes, and the rules of `vmap`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from crowdnal import reference
from crowdnal.data import Annotations
from crowdnal.ops import Op, check_memory

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
    """Base of the Functions, one per op. `forward` is the op; the arguments are kept if `setup_context` is not there.

    torch inspects the signature of a Function with `setup_context` on every call. Only `torch.func` needs that form, so
    outside its transforms a twin runs whose `forward` sets up the context itself; and where nothing is recorded (as in
    a backward pass that is not differentiated itself) only `forward` does.
    """

    generate_vmap_rule = True
    op: Op
    _twin: type[Function]

    def __init_subclass__(cls) -> None:
        if not hasattr(cls, "op"):  # a base of several
            return
        op = cls.op

        def forward(*inputs: Any) -> Any:
            return _call(op, *inputs)

        def record(ctx: Any, *inputs: Any) -> Any:
            output = forward(*inputs)
            cls.setup_context(ctx, inputs, output)
            return output

        this: Any = cls
        this.forward = staticmethod(forward)
        if cls.setup_context is Function.setup_context:
            this.setup_context = staticmethod(lambda ctx, inputs, _: cls.keep(ctx, inputs))
        members = {
            "forward": staticmethod(record),
            "backward": staticmethod(cls.backward),
            "jvp": staticmethod(cls.jvp),
        }
        this._twin = type(cls.__name__, (Function,), members)
        op.differentiate(cls.run, cls._vmap)

    @classmethod
    def run(cls, *inputs: Any) -> Any:
        """As `apply`, without its overhead."""
        if torch._C._are_functorch_transforms_active():
            _refuse_nested_forward_mode()
            return cls.apply(*inputs)
        if not torch.is_grad_enabled() and forward_ad._current_level < 0:
            return cls.forward(*inputs)
        return cls._twin.apply(*inputs)

    @classmethod
    def keep(cls, ctx: Any, inputs: Sequence[Any], *outputs: Tensor, without: Sequence[str] = ()) -> None:
        """Keeps the arguments (but for some) and outputs for the backward pass, and for tangents if there can be any.

        The same for both: `torch.func` has one list of batch dimensions for what is saved.
        """
        inputs = cls.op.arguments(*inputs)._replace(**dict.fromkeys(without)) if without else inputs
        tensors, ctx.rest = (*inputs[: cls.op.num_tensors], *outputs), inputs[cls.op.num_tensors :]
        ctx.save_for_backward(*tensors)
        if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
            ctx.save_for_forward(*tensors)

    @classmethod
    def kept(cls, ctx: Any) -> Any:
        """(named arguments, *outputs) of `keep`."""
        saved, count = ctx.saved_tensors, cls.op.num_tensors
        return cls.op.arguments(*saved[:count], *ctx.rest), *saved[count:]

    @classmethod
    def needs(cls, ctx: Any) -> Any:
        """Whether each argument needs a gradient, by name."""
        return cls.op.arguments(*ctx.needs_input_grad)

    @classmethod
    def _vmap(cls, info: Any, dims: Any, *inputs: Any) -> Any:
        return cls.vmap_op(VmapBatch(cls.op, info.batch_size, dims, inputs))

    @staticmethod
    def vmap_op(batch: VmapBatch) -> Any:
        """The rule of `vmap` for the op: (outputs, their batch dimensions)."""
        raise NotImplementedError


def _refuse_nested_forward_mode() -> None:
    """torch switches forward mode off, all levels of it, while a Function's own `jvp` runs: a wrong Hessian."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    if sum(level.key() == torch._C._functorch.TransformType.Jvp for level in stack) > 1:
        raise RuntimeError(
            "forward mode inside forward mode (jacfwd of jacfwd) would silently be wrong for a torch Function: use "
            "torch.func.hessian, or jacrev for one of the two"
        )


def _call(op: Op, *args: Any) -> Any:
    """A raw op from inside an `OpFunction`, past the Python autograd kernel that is there for direct callers.

    What it refuses without a name of ours (None for a tensor, which no kernel sees) is said again by name; and no
    kernel can throw torch's own error where memory is short.
    """
    try:
        if torch._C._are_functorch_transforms_active():
            return op.overload(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op.overload(*args)
    except RuntimeError as error:
        check_memory(error)
        if "crowdnal: " not in str(error):
            op.refuse(args)
        raise


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


def check_dense(name: str, tensor: Any) -> None:
    """Raises ValueError unless `tensor` is one of real numbers, not sparse, and whole."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if not torch.compiler.is_compiling() and hasattr(tensor, "device_mesh"):
        raise ValueError(
            f"{name} is a DTensor, sharded over processes, but must be whole: between model.unshard() and "
            f"model.reshard() the parameters of an FSDP unit are, and {name}.full_tensor() is; for very many "
            "annotators use an objective with rank= or groups="
        )
    if tensor.layout != torch.strided or tensor.is_complex() or tensor.is_quantized:
        raise ValueError(f"{name} is {tensor.layout}, {tensor.dtype}: give a dense tensor of real numbers")


def check_shape(name: str, tensor: Tensor, *sizes: int, meaning: str) -> None:
    """Raises ValueError unless `tensor` has exactly these sizes; `meaning` reads like "[num_items, num_classes]"."""
    check_dense(name, tensor)
    if tuple(tensor.shape) != sizes:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {meaning} = {sizes}")


def check_confusion(confusion: Tensor, annotations: Annotations, label_dim: int) -> None:
    """Raises ValueError unless confusion is [R, ., .] with the label set of the annotations on `label_dim`."""
    check_dense("confusion", confusion)
    if confusion.dim() != 3 or confusion.shape[0] != annotations.num_annotators:
        raise ValueError(
            f"confusion has shape {tuple(confusion.shape)}, but the annotations have "
            f"num_annotators={annotations.num_annotators}: one matrix per annotator is needed"
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

    def __init__(self, op: Op, size: int, dims: Any, inputs: Any) -> None:
        self.size, self.op = size, op
        self.arguments, self.dims = op.arguments(*inputs), op.arguments(*dims)

    def front(self, name: str) -> Any:
        """The argument with its mapped dimension in front, expanded where there is none; None stays None."""
        tensor, dim = getattr(self.arguments, name), getattr(self.dims, name)
        if tensor is None:
            return None
        return tensor.expand(self.size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

    def fold(self, *rows: str, matrices: str | None = None, share: bool = True) -> Any:
        """The arguments with the index tensors of all problems, and those named [size, n, ...] as [size x n, ...].

        The matrices stay as they are where all problems `share` one set; without any the op has `num_annotators`.
        """
        changed = {name: None if (t := self.front(name)) is None else t.flatten(0, 1) for name in rows}
        offset = 0
        if matrices is None:
            offset = self.arguments.num_annotators
            changed["num_annotators"] = self.size * offset
        elif not (share and getattr(self.dims, matrices) is None):
            every = self.front(matrices)
            changed[matrices], offset = every.flatten(0, 1), every.shape[1]
        return self.arguments._replace(**changed, **self._index(offset))

    def _index(self, num_annotators: int) -> dict[str, Tensor]:
        """The four index tensors, annotators `num_annotators` apart."""
        indptr, item, annotator, order = (self.front(name) for name in ("indptr", "item", "annotator", "order"))
        num_items, nnz = indptr.shape[1] - 1, annotator.shape[1]
        problem = torch.arange(self.size, device=indptr.device).unsqueeze(1)
        annotator, order = (annotator + problem * num_annotators).flatten(), (order + problem * nnz).flatten()
        if num_annotators == 0:
            order = torch.argsort(annotator, stable=True)
        ends = (indptr[:, 1:] + problem * nnz).flatten()
        indptr, item = torch.cat([ends.new_zeros(1), ends]), (item + problem * num_items).flatten()
        return {"indptr": indptr, "item": item, "annotator": annotator, "order": order}

    def split(self, tensor: Tensor) -> Tensor:
        """[size x n, ...] as [size, n, ...]."""
        return tensor.reshape(self.size, tensor.shape[0] // self.size, *tensor.shape[1:])

    def run(self, folded: Any) -> Any:
        """The op on folded arguments, its outputs split."""
        out = self.op.overload(*folded)
        return self.split(out) if isinstance(out, Tensor) else tuple(map(self.split, out))

    def loss(self, nll: Tensor) -> Tensor:
        """The `loss` output [size] of nll [size, nnz]."""
        total = (nll if self.arguments.weight is None else nll * self.front("weight")).sum(1)
        return total / max(nll.shape[1], 1) if self.arguments.mean else total

    def upstream(self, like: Tensor) -> Tensor:
        """d output / d nll [size x nnz] of grad_loss, grad_nll and weight; `like` is [size, nnz, ...]."""
        grad_loss, grad_nll, weight = (self.front(name) for name in ("grad_loss", "grad_nll", "weight"))
        out = like.new_zeros(like.shape[:2])
        if grad_loss is not None:
            scale = grad_loss.unsqueeze(1) / (max(like.shape[1], 1) if self.arguments.mean else 1)
            out = out + (scale if weight is None else scale * weight)
        return (out if grad_nll is None else out + grad_nll).flatten()
