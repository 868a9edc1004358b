"""The CUDA toolkit: where it lies, whether it fits torch, what it compiles for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple


class Toolkit(NamedTuple):
    home: Path
    version: tuple[int, int]

    @property
    def nvcc(self) -> Path:
        return _nvcc(self.home)

    @property
    def default_architectures(self) -> str:
        return "8.0;9.0;10.0+PTX" if self.version >= (12, 8) else "8.0;9.0+PTX"


def _nvcc(home: Path) -> Path:
    return home / "bin" / ("nvcc.exe" if os.name == "nt" else "nvcc")


def _homes() -> list[Path]:
    """Where it may be: as the environment says, where it usually is, where nvcc really lies."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return [Path(named)]
    nvcc = shutil.which("nvcc")  # perhaps a link or a wrapper
    return [Path("/usr/local/cuda"), *([Path(nvcc).resolve().parents[1]] if nvcc else [])]


def _output(*command: str | Path) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace").stdout
    except OSError:
        return ""


def find(cuda: str) -> Toolkit:
    """The toolkit for a torch of this version of CUDA.

    Raises:
        LookupError: There is none, or one of another major version.
    """
    home = next((home for home in _homes() if _nvcc(home).exists() and (home / "include").is_dir()), None)
    if home is None:
        raise LookupError("no CUDA toolkit was found (CUDA_HOME names one)")
    version = re.search(r"release (\d+)\.(\d+)", _output(_nvcc(home), "--version"))
    if version is None or version[1] != cuda.partition(".")[0]:
        found = version[0] if version else "of an unknown version"
        raise LookupError(f"nvcc ({home}) is {found}, torch was built with CUDA {cuda}")
    return Toolkit(home, (int(version[1]), int(version[2])))


def architectures(toolkit: Toolkit) -> str:
    """For `TORCH_CUDA_ARCH_LIST`: what it names already, less what this nvcc does not compile for any more (or yet)."""
    named = re.split(r"[;\s]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip("; \t\n"))
    compiled = set(re.findall(r"sm_(\d+)", _output(toolkit.nvcc, "--list-gpu-code")))
    dropped = []
    for name in named:
        number = re.fullmatch(r"(\d+)\.(\d+)[a-z]?(?:\+PTX)?", name)  # others, such as Hopper, are torch's to resolve
        if number is not None and compiled and number[1] + number[2] not in compiled:
            dropped.append(name)
    kept = [name for name in named if name and name not in dropped]
    if dropped:
        instead = "" if kept else f", which leaves none: the default is taken, {toolkit.default_architectures}"
        release = ".".join(map(str, toolkit.version))
        print(f"crowdnal: nvcc {release} does not compile for {', '.join(dropped)}: left out{instead}", flush=True)
    return ";".join(kept) or toolkit.default_architectures
