"""Comparisons that say where two tensors differ most, by how much, and what was allowed there.

Every element is judged by a tolerance of its own; of those that fail, the worst is the one that exceeds it most often.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

TOLERANCES = {  # rtol, atol: those of torch.testing.assert_close
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}


def assert_close(
    ours: Any,
    wanted: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = False,
    where: str = "",
) -> None:
    """``|ours - wanted| <= atol + rtol · |wanted|`` in every element, and the same shape, dtype and device.

    Args:
        ours: a tensor, a number, or a list, tuple or mapping of them.
        wanted: of the same structure; an array of NumPy says nothing of the dtype of a tensor.
        rtol: share of the wanted value; with ``atol`` left out too, that of the dtype.
        atol: absolute tolerance.
        equal_nan: NaN is what was wanted where NaN is wanted.
        where: what is compared, for the message.
    """
    if isinstance(wanted, Mapping):
        assert set(ours) == set(wanted), f"{where or 'mapping'} has {sorted(ours)}, wanted are {sorted(wanted)}"
        pairs = [(f"{where}[{key!r}]", ours[key], value) for key, value in wanted.items()]
    elif isinstance(wanted, (list, tuple)):
        assert len(ours) == len(wanted), f"{where or 'list'} has {len(ours)} elements, wanted are {len(wanted)}"
        pairs = [(f"{where}[{n}]", one, other) for n, (one, other) in enumerate(zip(ours, wanted, strict=True))]
    else:
        ours, wanted = _tensors(ours, wanted, where)
        defaults = TOLERANCES.get(wanted.dtype, (0.0, 0.0)) if rtol is None and atol is None else (0.0, 0.0)
        r, a = (default if given is None else given for given, default in zip((rtol, atol), defaults, strict=True))
        allowed = a + r * _wide(wanted).abs() if r else torch.full(wanted.shape, float(a), dtype=torch.float64)
        rule = f"{a:g} + {r:g} · |wanted|" if r and a else f"{r:g} · |wanted|" if r else f"{a:g}"
        return _check(ours, wanted, allowed, rule if r or a else "nothing", equal_nan, where)
    for name, one, other in pairs:
        assert_close(one, other, rtol=rtol, atol=atol, equal_nan=equal_nan, where=name)


def assert_within(ours: Tensor, wanted: Tensor, allowed: Tensor | float, where: str = "") -> None:
    """``|ours - wanted| <= allowed`` in every element; `wanted` may be of a higher precision."""
    assert ours.shape == wanted.shape, f"{where or 'tensor'} has shape {list(ours.shape)}, not {list(wanted.shape)}"
    bound = torch.as_tensor(allowed, dtype=torch.float64, device="cpu").expand(wanted.shape)
    assert not bound.isnan().any(), f"{where or 'tensor'}: the bound is NaN"
    _check(ours, wanted, bound, f"{bound.max().item() if bound.numel() else 0:.3g}", False, where)


def assert_same(ours: Any, wanted: Any, where: str = "") -> None:
    """Equal in every element: what is meant to be the same bits."""
    assert_close(ours, wanted, rtol=0.0, atol=0.0, where=where)


def _tensors(ours: Any, wanted: Any, where: str) -> tuple[Tensor, Tensor]:
    if isinstance(wanted, (np.ndarray, np.generic)):  # computed by hand: its dtype is that of Python
        ours = ours.detach().double() if isinstance(ours, Tensor) else torch.as_tensor(ours, dtype=torch.float64)
        wanted = torch.as_tensor(np.asarray(wanted, dtype=np.float64))
        assert ours.shape == wanted.shape, f"{where or 'tensor'} has shape {list(ours.shape)}, not {list(wanted.shape)}"
        return ours, wanted
    if isinstance(ours, Tensor) != isinstance(wanted, Tensor):
        raise TypeError(f"{where or 'values'}: {type(ours).__name__} is compared with {type(wanted).__name__}")
    if not isinstance(wanted, Tensor):
        return torch.as_tensor(ours, dtype=torch.float64), torch.as_tensor(wanted, dtype=torch.float64)
    for what in ("shape", "dtype", "device", "layout"):
        one, other = getattr(ours, what), getattr(wanted, what)
        assert one == other, f"{where or 'tensor'} has {what} {one}, wanted is {other}"
    return ours, wanted


def _wide(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return tensor.cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)


def _check(ours: Tensor, wanted: Tensor, allowed: Tensor, rule: str, equal_nan: bool, where: str) -> None:
    a, b = _wide(ours), _wide(wanted)
    same = (a == b) | (a.isnan() & b.isnan()) if equal_nan else a == b
    error = (a - b).abs()
    error = torch.where(same, 0.0, error.where(a.isfinite() & b.isfinite(), torch.inf))
    wrong = (error > allowed) | (error == torch.inf)
    if not wrong.any():
        return
    times = torch.where(error == torch.inf, torch.inf, error / allowed.clamp(min=torch.finfo(torch.float64).tiny))
    times = torch.where(wrong, times, -1.0)
    most = torch.where(times == times.max(), error, -1.0).argmax()
    place = [int(i) for i in torch.unravel_index(most, wanted.shape)]
    found, meant, off, bound = (t.flatten()[most].item() for t in (a, b, error, allowed))
    raise AssertionError(
        f"{where or 'tensor'}: {int(wrong.sum())} of {wrong.numel()} elements of {list(wanted.shape)} differ by more "
        f"than {rule}\nworst at {place}: ours {found!r}, wanted {meant!r}, difference {off:.4g}, allowed {bound:.4g}"
    )
