"""Builds the launchers and kernels of csrc/cuda for the emulator: a pybind11 module with ops on tensors of the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ninja
import pybind11
import torch

from crowdnal.ops import OPS

HERE = Path(__file__).resolve().parents[1] / "emulation"
CSRC = HERE.parents[1] / "csrc"
NAME = "crowdnal_emulated"
EXTRA = os.environ.get("CROWDNAL_EMULATOR_FLAGS", "").split()
"""Of the compiler and the linker: `tests/sanitize.py` asks for sanitizers."""
MOST_BLOCKS = 2**31 - 1


def build(folder: Path) -> Path:
    """Compiles the launchers and kernels into `folder`; returns the library."""
    torch_folder = Path(torch.__file__).parent
    sources = [HERE / "configure.cpp", *sorted((CSRC / "cuda").glob("*.cu"))]
    defines = ["CROWDNAL_EMULATOR", f"crowdnal={NAME}", "TORCH_TARGET_VERSION=0x020a000000000000"]
    flags = [
        "-std=c++20",
        "-O1",
        "-g0",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wall",
        *(f"-D{define}" for define in defines),
        *EXTRA,
    ]
    flags += [f"-I{HERE}", f"-I{CSRC}"]
    outside = [torch_folder / "include", pybind11.get_include(), sysconfig.get_paths()["include"]]
    flags += [f"-isystem {include}" for include in outside]
    libraries = f"-L{torch_folder / 'lib'} -lc10 -ltorch_cpu -ltorch {' '.join(EXTRA)}"
    lines = [
        f"flags = {' '.join(flags)}",
        "rule compile\n  command = c++ $flags -c -x c++ $in -o $out",
        f"rule link\n  command = c++ -shared $in {libraries} -o $out",
        *(f"build {source.stem}.o: compile {source}" for source in sources),
        f"build {NAME}.so: link {' '.join(f'{source.stem}.o' for source in sources)}",
    ]
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")
    done = subprocess.run([Path(ninja.BIN_DIR) / "ninja", "-C", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / f"{NAME}.so"


def program(name: str, folder: Path, csrc: Path = CSRC, flags: Sequence[str] = ()) -> Path:
    """Compiles programs/`name`.cpp into `folder`; returns the executable."""
    out = folder / name
    common = ["-std=c++20", "-O0", "-Wall", "-DCROWDNAL_EMULATOR", f"-I{csrc}", f"-I{HERE}"]
    command = ["c++", *common, *flags, HERE / "programs" / f"{name}.cpp", "-o", out]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


class Emulated:
    """The ops of `torch.ops.crowdnal` as the CUDA library registers them, on the emulator."""

    def __init__(self, library: Path) -> None:
        self.definitions = torch.library.Library(NAME, "DEF")
        for op in OPS.values():
            self.definitions.define(op.name + op.schema)
        spec = importlib.util.spec_from_file_location(NAME, library)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)  # loading it registers the ops
        spec.loader.exec_module(module)
        self.configure: Callable[[int, int], None] = module.configure
        self.limit: Callable[[int], None] = module.limit

    def op(self, name: str, seed: int = 0, most_blocks: int = MOST_BLOCKS) -> Callable[..., Any]:
        """Blocks and threads run in an order that `seed` decides."""

        def run(*args: Any) -> Any:
            self.configure(seed, most_blocks)
            return getattr(getattr(torch.ops, NAME), name)(*args)

        return run
