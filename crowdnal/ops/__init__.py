"""The ops: their schemas, the native library, and what torch must know of them (fake tensors, autocast).

Every op takes the four index tensors of a batch of annotations: indptr [B + 1], item, annotator, order [nnz]; only
`em_step`, which has no derivatives, needs no item, and an order only on CUDA; nor does `select` have any of its own.
`MATRICES` may be in half precision, on every device: they are read as they are stored, and all else is float32 then.
The schemas stand here, and not in C++, so that they exist without the native library too: the kernels of the
library take precedence on their device, `crowdnal.reference` serves every other one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crowdnal import reference

_INDEX = "Tensor indptr, Tensor item, Tensor annotator, Tensor order"
_GRADS = "Tensor? grad_loss, Tensor? grad_nll"
SCHEMAS = {
    "mix": f"(Tensor scores, Tensor confusion, {_INDEX}) -> Tensor",
    "mix_items": f"(Tensor grad, Tensor confusion, {_INDEX}) -> Tensor",
    "select": "(Tensor confusion, Tensor annotators) -> Tensor",
    "mix_annotators": f"(Tensor scores, Tensor grad, {_INDEX}, SymInt num_annotators) -> Tensor",
    "softmax_link": f"(Tensor scores, Tensor confusion, Tensor? shared, Tensor? mixing, Tensor? weight, {_INDEX}, "
    "Tensor label, bool mean) -> (Tensor loss, Tensor nll, Tensor probs)",
    "softmax_link_backward": f"({_GRADS}, Tensor scores, Tensor confusion, Tensor? shared, Tensor? mixing, "
    f"Tensor? weight, {_INDEX}, Tensor label, Tensor probs, bool mean, bool need_scores, bool need_confusion, "
    "bool need_shared, bool need_mixing) "
    "-> (Tensor scores_grad, Tensor confusion_grad, Tensor shared_grad, Tensor mixing_grad)",
    "mixture_link": f"(Tensor log_probs, Tensor confusion, Tensor? weight, {_INDEX}, Tensor label, "
    "int normalization, bool mean) -> (Tensor loss, Tensor nll, Tensor posterior, Tensor log_norm)",
    "mixture_link_backward": f"({_GRADS}, Tensor log_probs, Tensor confusion, Tensor? weight, {_INDEX}, Tensor label, "
    "Tensor posterior, Tensor? log_norm, int normalization, bool mean, bool need_log_probs, bool need_confusion) "
    "-> (Tensor log_probs_grad, Tensor confusion_grad)",
    "label_log_likelihood": f"(Tensor log_confusion, Tensor? weight, {_INDEX}, Tensor label) -> Tensor",
    "label_counts": f"(Tensor values, Tensor? weight, {_INDEX}, Tensor label, SymInt num_annotators, "
    "SymInt num_labels) -> Tensor",
    "em_step": "(Tensor? log_prior, Tensor log_confusion, Tensor? weight, Tensor indptr, Tensor annotator, "
    "Tensor? order, Tensor label) -> (Tensor loss, Tensor posterior, Tensor counts, Tensor totals)",
    "joint_link": f"(Tensor log_prior, Tensor confusion, Tensor? weight, {_INDEX}, Tensor label, "
    "int normalization, bool mean) -> (Tensor loss, Tensor nll, Tensor posterior, Tensor log_norm)",
    "joint_link_backward": f"({_GRADS}, Tensor log_prior, Tensor confusion, Tensor? weight, {_INDEX}, Tensor label, "
    "Tensor posterior, Tensor? log_norm, int normalization, bool mean, bool need_log_prior, bool need_confusion) "
    "-> (Tensor log_prior_grad, Tensor confusion_grad)",
    "pair_confusion": f"(Tensor difficulty, Tensor competence, {_INDEX}, Tensor label) "
    "-> (Tensor log_q, Tensor log_norm)",
    "pair_confusion_backward": f"(Tensor grad, Tensor difficulty, Tensor competence, {_INDEX}, Tensor label, "
    "Tensor log_q, Tensor log_norm, bool need_difficulty, bool need_competence) "
    "-> (Tensor difficulty_grad, Tensor competence_grad)",
}

MATRICES = ("confusion", "log_confusion", "difficulty", "competence")
"""Names of the arguments of which there is one matrix an annotator (`difficulty`: one an item)."""

_library = torch.library.Library("crowdnal", "DEF")
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, getattr(reference, _name), "CompositeExplicitAutograd")

_native: set[str] = set()


def _load(device: str) -> str | None:
    """Loads the native library of a device; returns what went wrong, None if nothing (or none was built).

    That of CUDA has the major version of CUDA in its name: two CUDA runtimes in a process need not get on.
    """
    failure, name = None, f"_{device}"
    if device == "cuda":
        name += str(torch.version.cuda).partition(".")[0]
    for path in sorted(Path(__file__).parents[1].glob(f"_{device}*.so")):
        if path.name.partition(".")[0] != name:
            failure = f"{path.name} is not for CUDA {torch.version.cuda}, which torch {torch.__version__} is for"
            continue
        try:
            torch.ops.load_library(path)
            _native.add(device)
            return None
        except OSError as error:
            failure = f"{path.name} cannot be loaded ({error.__cause__ or error})"  # why, where torch only says which
    return failure


def _load_all() -> None:
    if os.environ.get("CROWDNAL_DISABLE_NATIVE") == "1":
        failure: str | None = "CROWDNAL_DISABLE_NATIVE=1 is set"
    else:
        failure = _load("cpu")
        if failure is None and "cpu" not in _native:
            failure = (
                "no native library was built; CROWDNAL_REQUIRE_NATIVE=1 pip install -v ... shows why "
                "(and a source tree needs pip install -e .)"
            )
        if torch.version.cuda is not None:  # the library is linked with what only such a torch brings
            cuda_failure = _load("cuda")
            if cuda_failure is not None:
                warnings.warn(f"crowdnal runs on its plain PyTorch reference on CUDA: {cuda_failure}", stacklevel=3)
    if failure is not None:
        warnings.warn(f"crowdnal runs on its plain PyTorch reference, which is slower: {failure}", stacklevel=3)


_load_all()


def backend() -> dict[str, str]:
    """Which implementation serves the ops: {"cpu": "native" | "reference", "cuda": "native" | "reference"}."""
    return {device: "native" if device in _native else "reference" for device in ("cpu", "cuda")}


def _empty(matrices: Tensor, *sizes: int) -> Tensor:
    """Of the dtype that the matrices are computed in."""
    return matrices.new_empty(sizes, dtype=reference.compute_dtype(matrices.dtype))


@torch.library.register_fake("crowdnal::mix", lib=_library)
def _(scores: Tensor, confusion: Tensor, indptr: Tensor, item: Tensor, annotator: Tensor, order: Tensor) -> Tensor:
    return scores.new_empty(annotator.shape[0], confusion.shape[2])


@torch.library.register_fake("crowdnal::mix_items", lib=_library)
def _(grad: Tensor, confusion: Tensor, indptr: Tensor, item: Tensor, annotator: Tensor, order: Tensor) -> Tensor:
    return grad.new_empty(indptr.shape[0] - 1, confusion.shape[1])


@torch.library.register_fake("crowdnal::mix_annotators", lib=_library)
def _(
    scores: Tensor,
    grad: Tensor,
    indptr: Tensor,
    item: Tensor,
    annotator: Tensor,
    order: Tensor,
    num_annotators: int,
) -> Tensor:
    return scores.new_empty(num_annotators, scores.shape[1], grad.shape[1])


@torch.library.register_fake("crowdnal::select", lib=_library)
def _(confusion: Tensor, annotators: Tensor) -> Tensor:
    return confusion.new_empty(annotators.shape[0], *confusion.shape[1:])


@torch.library.register_fake("crowdnal::softmax_link", lib=_library)
def _(scores, confusion, shared, mixing, weight, indptr, item, annotator, order, label, mean):  # type: ignore[no-untyped-def]
    nnz = annotator.shape[0]
    return scores.new_empty(()), scores.new_empty(nnz), scores.new_empty(nnz, confusion.shape[2])


@torch.library.register_fake("crowdnal::softmax_link_backward", lib=_library)
def _(  # type: ignore[no-untyped-def]
    grad_loss, grad_nll, scores, confusion, shared, mixing, weight, indptr, item, annotator, order, label, probs, mean,
    need_scores, need_confusion, need_shared, need_mixing,
):  # fmt: skip
    num_items = indptr.shape[0] - 1
    return (
        scores.new_empty(num_items if need_scores else 0, scores.shape[1]),
        scores.new_empty(confusion.shape[0] if need_confusion else 0, *confusion.shape[1:]),
        scores.new_empty(num_items if need_shared else 0, confusion.shape[2]),
        scores.new_empty(annotator.shape[0] if need_mixing else 0),
    )


@torch.library.register_fake("crowdnal::mixture_link", lib=_library)
def _(log_probs, confusion, weight, indptr, item, annotator, order, label, normalization, mean):  # type: ignore[no-untyped-def]
    nnz, classes = annotator.shape[0], confusion.shape[2]
    norms = 0 if normalization == reference.NONE else torch.sym_min(nnz, confusion.shape[0])
    nll, posterior, log_norm = (log_probs.new_empty(size) for size in ((nnz,), (nnz, classes), (norms, classes)))
    return log_probs.new_empty(()), nll, posterior, log_norm


@torch.library.register_fake("crowdnal::mixture_link_backward", lib=_library)
def _(  # type: ignore[no-untyped-def]
    grad_loss, grad_nll, log_probs, confusion, weight, indptr, item, annotator, order, label, posterior, log_norm,
    normalization, mean, need_log_probs, need_confusion,
):  # fmt: skip
    return (
        log_probs.new_empty(indptr.shape[0] - 1 if need_log_probs else 0, confusion.shape[2]),
        log_probs.new_empty(confusion.shape[0] if need_confusion else 0, *confusion.shape[1:]),
    )


@torch.library.register_fake("crowdnal::label_log_likelihood", lib=_library)
def _(log_confusion, weight, indptr, item, annotator, order, label):  # type: ignore[no-untyped-def]
    return _empty(log_confusion, indptr.shape[0] - 1, log_confusion.shape[2])


@torch.library.register_fake("crowdnal::label_counts", lib=_library)
def _(values, weight, indptr, item, annotator, order, label, num_annotators, num_labels):  # type: ignore[no-untyped-def]
    return values.new_empty(num_annotators, num_labels, values.shape[1])


@torch.library.register_fake("crowdnal::em_step", lib=_library)
def _(log_prior, log_confusion, weight, indptr, annotator, order, label):  # type: ignore[no-untyped-def]
    posterior = _empty(log_confusion, indptr.shape[0] - 1, log_confusion.shape[2])
    counts, totals = _empty(log_confusion, *log_confusion.shape), _empty(log_confusion, log_confusion.shape[2])
    return _empty(log_confusion), posterior, counts, totals


@torch.library.register_fake("crowdnal::joint_link", lib=_library)
def _(log_prior, confusion, weight, indptr, item, annotator, order, label, normalization, mean):  # type: ignore[no-untyped-def]
    num_items, classes = indptr.shape[0] - 1, confusion.shape[2]
    norms = 0 if normalization == reference.NONE else torch.sym_min(annotator.shape[0], confusion.shape[0])
    nll, posterior, log_norm = (log_prior.new_empty(s) for s in ((num_items,), (num_items, classes), (norms, classes)))
    return log_prior.new_empty(()), nll, posterior, log_norm


@torch.library.register_fake("crowdnal::joint_link_backward", lib=_library)
def _(  # type: ignore[no-untyped-def]
    grad_loss, grad_nll, log_prior, confusion, weight, indptr, item, annotator, order, label, posterior, log_norm,
    normalization, mean, need_log_prior, need_confusion,
):  # fmt: skip
    return (
        log_prior.new_empty(indptr.shape[0] - 1 if need_log_prior else 0, confusion.shape[2]),
        log_prior.new_empty(confusion.shape[0] if need_confusion else 0, *confusion.shape[1:]),
    )


@torch.library.register_fake("crowdnal::pair_confusion", lib=_library)
def _(difficulty, competence, indptr, item, annotator, order, label):  # type: ignore[no-untyped-def]
    nnz, classes = annotator.shape[0], competence.shape[1]
    return _empty(competence, nnz, classes), _empty(competence, nnz, classes)


@torch.library.register_fake("crowdnal::pair_confusion_backward", lib=_library)
def _(  # type: ignore[no-untyped-def]
    grad, difficulty, competence, indptr, item, annotator, order, label, log_q, log_norm, need_difficulty,
    need_competence,
):  # fmt: skip
    return (
        grad.new_empty(indptr.shape[0] - 1 if need_difficulty else 0, *competence.shape[1:]),
        grad.new_empty(competence.shape[0] if need_competence else 0, *competence.shape[1:]),
    )


def register(name: str, function: Any, vmap: Callable[..., Any]) -> None:
    """Gives the raw op (for direct callers and `torch.compile`) the derivatives of its `OpFunction`, and a `vmap` rule.

    Not `torch.library.register_autograd`: that one drops tangents in forward mode without a word.
    """
    _library.impl(name, function.run, "Autograd")
    torch.library.register_vmap(f"crowdnal::{name}", vmap, lib=_library)


def _register_autocast(name: str, device: str) -> None:
    """Float32 for all but what the op reads as it is; `torch.library.register_autocast` would copy the matrices too."""
    overload = getattr(torch.ops.crowdnal, name).default
    stored = [n for n, argument in enumerate(overload._schema.arguments) if argument.name in MATRICES]
    key = f"Autocast{device.upper()}"
    below = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(_: Any, *args: Any) -> Any:
        dtypes = {args[n].dtype for n in stored}
        kept = stored if dtypes in ({torch.float16}, {torch.bfloat16}) else []
        cast = (a if n in kept else _single(a, device) for n, a in enumerate(args))
        with torch._C._ExcludeDispatchKeyGuard(below):
            return overload(*cast)

    _library.impl(name, kernel, key, with_keyset=True)


def _single(value: Any, device: str) -> Any:
    """Float32 of a tensor in a lower precision on the device."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.device.type != device:
        return value
    return value if value.dtype == torch.float64 else value.float()


for _name in SCHEMAS.keys() - {"select"}:  # which keeps the dtype
    for _device in ("cpu", "cuda"):
        _register_autocast(_name, _device)
