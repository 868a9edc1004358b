"""Warnings that point at the user's line."""

from __future__ import annotations

import sys
import warnings


def warn(text: str) -> None:
    """Warn at the line outside this package that called it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _inside(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _inside(module: str) -> bool:
    """Of this package, or of a decorator that torch puts around its functions."""
    return module.startswith("crowdnal.") or module == "torch.utils._contextlib"
