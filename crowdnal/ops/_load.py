"""The native libraries: their kernels take precedence over the definitions, each on its device."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch

_native: set[str] = set()


def load(device: str) -> str | None:
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


def load_all() -> None:
    """Loads what was built and fits torch; warns where the definitions have to serve instead."""
    if os.environ.get("CROWDNAL_DISABLE_NATIVE") == "1":
        failure: str | None = "CROWDNAL_DISABLE_NATIVE=1 is set"
    else:
        failure = load("cpu")
        if failure is None and "cpu" not in _native:
            failure = (
                "no native library was built; CROWDNAL_REQUIRE_NATIVE=1 pip install -v ... shows why "
                "(and a source tree needs pip install -e .)"
            )
        if torch.version.cuda is not None:  # the library is linked with what only such a torch brings
            cuda_failure = load("cuda")
            if cuda_failure is not None:
                warnings.warn(f"crowdnal runs on its plain PyTorch reference on CUDA: {cuda_failure}", stacklevel=3)
    if failure is not None:
        warnings.warn(f"crowdnal runs on its plain PyTorch reference, which is slower: {failure}", stacklevel=3)


def backend() -> dict[str, str]:
    """Which implementation serves the ops: {"cpu": "native" | "reference", "cuda": "native" | "reference"}."""
    return {device: "native" if device in _native else "reference" for device in ("cpu", "cuda")}
