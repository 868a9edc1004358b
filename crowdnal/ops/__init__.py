"""The ops, `torch.ops.crowdnal.*`: one file per family, in which each is declared once.

Every op takes the index tensors of a batch of annotations: indptr [B + 1], item, annotator, order [nnz] and, or None,
plan [nnz, 4]; only `em_step`, which has no derivatives, needs no item and no plan, and an order only on CUDA; nor does
`select` have any of its own.
The schemas stand here, and not in C++, so that they exist without the native library too. How an op is added:
docs/adding-an-op.md.
"""

from importlib import import_module
from pkgutil import iter_modules

from crowdnal.ops._declare import OPS, Op, check_memory, declare, library
from crowdnal.ops._load import backend, load_all

__all__ = ["OPS", "Op", "backend", "check_memory", "declare"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
load_all(library, {name: op.fallback for name, op in OPS.items()})
