"""What is known of an op, said once: its schema (the signature of its definition), its fake, its matrices."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from crowdnal.ops._check import devices, problem

library = torch.library.Library("crowdnal", "DEF")


class Arguments:
    """Base of the named tuples of an op's arguments, with what the index tensors tell."""

    __slots__ = ()
    indptr: Tensor
    item: Tensor
    annotator: Tensor
    order: Tensor
    plan: Tensor | None

    @property
    def index(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """The index tensors, in the order that the ops take them in."""
        return self.indptr, self.item, self.annotator, self.order, self.plan

    @property
    def num_items(self) -> int:
        """B."""
        return self.indptr.shape[0] - 1

    @property
    def nnz(self) -> int:
        """The number of annotations."""
        return self.annotator.shape[0]


def check_memory(error: RuntimeError) -> None:
    """Raises torch's own error if this one of a CUDA kernel says that memory is short, whose type C++ cannot throw."""
    found = str(error).find("CUDA out of memory. crowdnal: ")
    if found >= 0:
        raise torch.OutOfMemoryError(str(error)[found:].partition("\n")[0]) from error


class Op:
    """`torch.ops.crowdnal.<name>`; made by `declare`.

    Attributes:
        name: that of its definition.
        definition: the op in plain PyTorch: fallback and oracle.
        schema: arguments and results, for `torch.library`.
        matrices: names of the arguments that may be in half precision.
        shapes: sizes of the tensors, by name: a letter each (see `declare`).
        optional: names of the tensors that may be None.
        arguments: the named tuple of its arguments, or of anything else of which there is one per argument.
        fallback: the definition behind checks of its arguments, which serves every device without a native kernel.
        num_tensors: so many of the arguments are tensors (or None); they stand in front of the others.
    """

    def __init__(self, definition: Callable[..., Any], matrices: tuple[str, ...], shapes: str) -> None:
        self.name, self.definition, self.matrices = definition.__name__, definition, matrices
        self.fallback = definition
        self.shapes = {name: sizes for name, _, sizes in (each.partition(":") for each in shapes.split())}
        self.schema = torch.library.infer_schema(definition, mutates_args=())
        library.define(self.name + self.schema, tags=(torch.Tag.pt2_compliant_tag,))
        given = self.overload._schema.arguments
        fields: Any = namedtuple(f"_{self.name}", [argument.name for argument in given])  # type: ignore[misc]
        self.arguments: Any = type(self.name, (Arguments, fields), {"__slots__": ()})
        tensors = ["Tensor" in str(argument.type) for argument in given]
        self.optional = frozenset(argument.name for argument in given if "Optional" in str(argument.type))
        self.num_tensors = sum(tensors)
        self._function: Callable[..., Any] = self._undifferentiable
        if not all(tensors[: self.num_tensors]):
            raise TypeError(f"{self.name}: tensors must stand in front of the other arguments, got {self.schema}")

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The op, differentiable. `torch.compile`, which refuses Functions with a `jvp`, gets the raw op."""
        if named:
            inputs = self.arguments(*inputs, **named)
        return self.overload(*inputs) if torch.compiler.is_compiling() else self._function(*inputs)

    def _undifferentiable(self, *inputs: Any) -> Any:
        try:
            return self.overload(*inputs)
        except RuntimeError as error:
            check_memory(error)
            raise

    @property
    def overload(self) -> Any:
        """What is called; looked up each time, so that tests can put another library in its place."""
        return getattr(torch.ops.crowdnal, self.name).default

    def refuse(self, inputs: tuple[Any, ...], *, values: bool = True) -> None:
        """Raises ValueError if something is wrong with the arguments, naming it; `values`: index tensors are read."""
        wrong = problem(self, self.arguments(*inputs), values=values)
        if wrong is not None:
            raise ValueError(f"crowdnal: {self.name}: {wrong}")

    def gradients(self, **of: Tensor | None) -> tuple[Tensor | None, ...]:
        """One per argument: those given, None for the others."""
        out = tuple([of.pop(name, None) for name in self.arguments._fields])
        if of:
            raise TypeError(f"{self.name} has no argument {', '.join(of)}")
        return out

    def differentiate(self, function: Callable[..., Any], vmap: Callable[..., Any]) -> None:
        """Gives direct callers and `torch.compile` derivatives and a `vmap` rule.

        Not `torch.library.register_autograd`: that one drops tangents in forward mode without a word.
        """
        self._function = function
        library.impl(self.name, function, "Autograd")
        torch.library.register_vmap(f"crowdnal::{self.name}", vmap, lib=library)


OPS: dict[str, Op] = {}
"""Every op, by name."""


def declare(
    definition: Callable[..., Any], *, shapes: str, matrices: tuple[str, ...] = (), autocast: bool = True
) -> Callable[[Callable[[Any], Any]], Op]:
    """Defines an op: a decorator of its fake, which gets the named arguments and returns empty results.

    The definition serves every device without a native kernel.

    Args:
        definition: the function of `crowdnal.reference`, typed: its name and its signature are the op's.
        shapes: such as "scores:BC confusion:RCK", of all tensors but those of `INDEX`. B is the number of items and N
            that of annotations; R, C, K that of annotators, classes, labels; each letter is one size.
        matrices: arguments that may be in half precision: read as they are stored, while all else is float32 then.
        autocast: to float32, of all but what is read as it is stored.
    """

    def define(fake: Callable[[Any], Any]) -> Op:
        op = OPS[definition.__name__] = Op(definition, matrices, shapes)

        def checked(*inputs: Any) -> Any:
            op.refuse(inputs)
            return definition(*inputs)

        def checked_fake(*inputs: Any) -> Any:
            wrong = devices(dict(zip(op.arguments._fields, inputs, strict=False)))
            if wrong is not None:  # a result would be made of nothing
                raise ValueError(f"crowdnal: {op.name}: {wrong}")
            return fake(op.arguments(*inputs))

        op.fallback = checked
        library.impl(op.name, checked, "CompositeExplicitAutograd")
        torch.library.register_fake(f"crowdnal::{op.name}", checked_fake, lib=library)
        for device in ("cpu", "cuda") if autocast else ():
            _register_autocast(op, device)
        return op

    return define


def _register_autocast(op: Op, device: str) -> None:
    """As `torch.library.register_autocast`, which would copy the matrices too."""
    stored = [op.arguments._fields.index(name) for name in op.matrices]
    key = f"Autocast{device.upper()}"
    below = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(_: Any, *args: Any) -> Any:
        dtypes = {args[n].dtype for n in stored}
        kept = stored if dtypes in ({torch.float16}, {torch.bfloat16}) else []
        cast = (a if n in kept else _single(a, device) for n, a in enumerate(args))
        with torch._C._ExcludeDispatchKeyGuard(below):
            return op.overload(*cast)

    library.impl(op.name, kernel, key, with_keyset=True)


def _single(value: Any, device: str) -> Any:
    """Float32 of a tensor in a lower precision on the device."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.device.type != device:
        return value
    return value if value.dtype == torch.float64 else value.float()
