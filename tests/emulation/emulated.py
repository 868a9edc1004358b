"""Builds the kernels of csrc/cuda for the emulator and calls them like the ops."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import ninja
import pybind11
import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
NAME = "crowdnal_emulated"
DTYPES = {torch.float32: "float32", torch.float64: "float64"}
MOST_BLOCKS = 2**31 - 1


def build(folder: Path, csrc: Path = CSRC, flags: Sequence[str] = ()) -> Path:
    """Compiles the module into `folder`; returns its file."""
    includes = [csrc, HERE, pybind11.get_include(), sysconfig.get_paths()["include"]]
    sources = sorted(HERE.glob("*.cpp"))
    library = folder / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    common = ["-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-DCROWDNAL_EMULATOR", *flags]
    lines = [
        f"flags = {' '.join(common)} {' '.join(f'-I{path}' for path in includes)}",
        "rule compile\n  command = c++ $flags -MD -MF $out.d -c $in -o $out\n  depfile = $out.d\n  deps = gcc",
        f"rule link\n  command = c++ -shared {' '.join(flags)} $in -o $out",
        *(f"build {source.stem}.o: compile {source}" for source in sources),
        f"build {library.name}: link {' '.join(f'{source.stem}.o' for source in sources)}",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")
    done = subprocess.run([Path(ninja.BIN_DIR) / "ninja", "-C", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return library


def program(name: str, folder: Path, csrc: Path = CSRC, flags: Sequence[str] = ()) -> Path:
    """Compiles programs/`name`.cpp into `folder`; returns the executable."""
    out = folder / name
    common = ["-std=c++20", "-O0", "-Wall", "-DCROWDNAL_EMULATOR", f"-I{csrc}", f"-I{HERE}"]
    command = ["c++", *common, *flags, HERE / "programs" / f"{name}.cpp", "-o", out]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def load(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.pop(NAME, None)
    spec.loader.exec_module(module)
    return module


class Emulated:
    """The ops of `torch.ops.crowdnal`, run by the emulator in an order that `seed` decides."""

    def __init__(self, library: Path) -> None:
        self.module = load(library)

    def op(self, name: str, seed: int = 0, most_blocks: int = MOST_BLOCKS) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            dtype = next(a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point())
            self.module.configure(seed, most_blocks)
            function = getattr(getattr(self.module, DTYPES[dtype]), name)
            return _tensors(function(*(a.contiguous().numpy() if isinstance(a, Tensor) else a for a in args)))

        return run


def _tensors(out: Any) -> Any:
    return tuple(map(torch.from_numpy, out)) if isinstance(out, tuple) else torch.from_numpy(out)
