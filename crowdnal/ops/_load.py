"""The native libraries: their kernels take precedence over the definitions, each on its device."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

REBUILD = (
    "once that is put right: `pip cache remove crowdnal` (pip keeps what it built), then install again with "
    "--force-reinstall --no-deps"
)
OLD_RUNTIME = (
    "; this process has an older C++ runtime than the compiler (conda's, often): conda install -c conda-forge "
    "libstdcxx-ng, or build with the compilers of that environment (conda install cxx-compiler)"
)

_native: set[str] = set()


def load(device: str) -> str | None:
    """Loads the native library of a device; returns what went wrong, None if nothing (or none was built).

    That of CUDA has the major version of CUDA in its name: two CUDA runtimes in a process need not get on.
    """
    failure, name = None, f"_{device}"
    if device == "cuda":
        name += str(torch.version.cuda).partition(".")[0]
    folder = Path(__file__).parents[1]
    for path in sorted([*folder.glob(f"_{device}*.so"), *folder.glob(f"_{device}*.pyd")]):
        if path.name.partition(".")[0] != name:
            failure = f"{path.name} is not for CUDA {torch.version.cuda}, which torch {torch.__version__} is for"
            continue
        try:
            torch.ops.load_library(path)
            _native.add(device)
            return None
        except OSError as error:
            reason = str(error.__cause__ or error)  # why, where torch only says which
            runtime = OLD_RUNTIME if "GLIBCXX" in reason or "CXXABI" in reason else ""
            failure = f"{path.name} cannot be loaded ({reason}){runtime}"
    return failure


def not_built(device: str) -> str:
    """Why there is no library for a device, as far as the wheel tells, and what to do."""
    try:
        reasons = json.loads(Path(__file__).with_name("not_built.json").read_text(encoding="utf-8"))
    except OSError:
        reasons = {}
    library = {"cpu": "no native library was built", "cuda": "no library for CUDA was built"}[device]
    if device in reasons:
        return f"{library}: {reasons[device]}; {REBUILD}"
    return (
        f"{library}; CROWDNAL_REQUIRE_NATIVE=1 pip install -v --no-cache-dir ... shows why (and a source tree needs "
        "pip install -e .)"
    )


def _telling(definitions: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The definitions, the first of which to be called says that the reference serves CUDA tensors."""
    told = False

    def telling(definition: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*inputs: Any) -> Any:
            nonlocal told
            if not told:
                told = True
                warnings.warn(
                    f"crowdnal runs on its plain PyTorch reference on CUDA, which is slower: {not_built('cuda')}",
                    stacklevel=2,
                )
            return definition(*inputs)

        return kernel

    return {name: telling(definition) for name, definition in definitions.items()}


def load_all(library: torch.library.Library, definitions: dict[str, Callable[..., Any]]) -> None:
    """Loads what was built and fits torch; warns where the definitions have to serve instead.

    Where no library for CUDA was built that is when CUDA tensors first meet an op: to ask for a GPU at import would
    initialise the driver, after which a process cannot be forked.
    """
    if os.environ.get("CROWDNAL_DISABLE_NATIVE") == "1":
        failure: str | None = "CROWDNAL_DISABLE_NATIVE=1 is set"
    else:
        failure = load("cpu")
        if failure is None and "cpu" not in _native:
            failure = not_built("cpu")
        if torch.version.cuda is not None:  # the library is linked with what only such a torch brings
            cuda_failure = load("cuda")
            if cuda_failure is not None:
                warnings.warn(f"crowdnal runs on its plain PyTorch reference on CUDA: {cuda_failure}", stacklevel=3)
            elif "cuda" not in _native:
                for name, kernel in _telling(definitions).items():
                    library.impl(name, kernel, "CUDA")
    if failure is not None:
        warnings.warn(f"crowdnal runs on its plain PyTorch reference, which is slower: {failure}", stacklevel=3)


def backend() -> dict[str, str]:
    """Which implementation serves the ops: {"cpu": "native" | "reference", "cuda": "native" | "reference"}."""
    return {device: "native" if device in _native else "reference" for device in ("cpu", "cuda")}
