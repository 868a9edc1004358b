"""The native libraries. This file builds them or fails; `_build/backend.py` decides what a failure means.

One for the CPU, and one for CUDA where torch is a CUDA build and its compiler is there; no GPU is needed to build.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from glob import glob
from pathlib import Path
from typing import Any

from setuptools import setup

TORCH_TARGET = "0x020a000000000000"  # the stable ABI of torch 2.10: one binary for it and all later ones
BYTES_PER_JOB = 2 << 30
# Nothing reads errno or floating point exceptions: without them selections need no branches. Results are the same.
# Vectors wider than the processor's are passed between inlined functions only: no ABI to warn of.
VECTORIZE = ["-fno-trapping-math", "-fno-math-errno", "-Wno-psabi"]


def cap_jobs() -> None:
    """Keep a parallel compilation within the memory of the machine."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    jobs = min(os.cpu_count() or 1, memory // BYTES_PER_JOB)
    os.environ.setdefault("MAX_JOBS", str(max(1, jobs)))


def check_compiler() -> None:
    """Say plainly what would otherwise be a failure somewhere inside ninja."""
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(shlex.split(compiler)[0]) is None:
        raise RuntimeError(f"there is no C++ compiler: {compiler!r} is not found (CXX names another one)")


def cuda_homes() -> list[Path]:
    """Where the CUDA toolkit may be: as the environment says, where it usually is, where nvcc really lies."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return [Path(named)]
    nvcc = shutil.which("nvcc")  # perhaps a link or a wrapper
    return [Path("/usr/local/cuda"), *([Path(nvcc).resolve().parents[1]] if nvcc else [])]


def find_cuda() -> tuple[Path, tuple[int, int]] | None:
    """The toolkit and its version, if it can compile for the installed torch."""
    import torch

    if torch.version.cuda is None or os.environ.get("CROWDNAL_NO_CUDA") == "1":
        return None
    home = next((home for home in cuda_homes() if (home / "bin/nvcc").exists() and (home / "include").is_dir()), None)
    if home is None:
        print("crowdnal: no CUDA toolkit was found: CUDA tensors will be served by the reference", flush=True)
        return None
    said = subprocess.run([home / "bin/nvcc", "--version"], capture_output=True, text=True).stdout
    version = re.search(r"release (\d+)\.(\d+)", said)
    if version is None or version[1] != torch.version.cuda.partition(".")[0]:
        found = version[0] if version else "of an unknown version"
        print(f"crowdnal: nvcc ({home}) is {found}, torch was built with CUDA {torch.version.cuda}", flush=True)
        return None
    return home, (int(version[1]), int(version[2]))


def native() -> dict[str, Any]:
    """Arguments of `setup` that build the native libraries."""
    check_compiler()
    cap_jobs()
    cuda = find_cuda()
    if cuda is not None:  # torch reads both when it is asked for flags, and without them looks for a GPU
        os.environ["CUDA_HOME"] = str(cuda[0])
        newest = "9.0;10.0+PTX" if cuda[1] >= (12, 8) else "9.0+PTX"
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", f"8.0;{newest}")
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    cpu = CppExtension(
        "crowdnal._cpu",
        sorted(glob("csrc/cpu/**/*.cpp", recursive=True)),
        include_dirs=[os.path.abspath("csrc")],  # ninja runs elsewhere
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET)],
        extra_compile_args=["-O3", "-g0", "-fvisibility=hidden", "-fopenmp-simd", *VECTORIZE],
        py_limited_api=True,
    )
    extensions = [cpu]
    if cuda is not None:
        extensions.append(
            CUDAExtension(
                f"crowdnal._cuda{cuda[1][0]}",  # with the major version, as the loader expects
                sorted(glob("csrc/cuda/*.cu")),
                include_dirs=[os.path.abspath("csrc")],
                define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET), ("USE_CUDA", None)],
                extra_compile_args={"cxx": ["-O3", "-g0"], "nvcc": ["-O3", "-Xcompiler=-fvisibility=hidden"]},
                py_limited_api=True,
            )
        )
    return {
        "ext_modules": extensions,
        "cmdclass": {"build_ext": BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp311"}},
    }


# A build folder that outlives the build would bring deleted modules back into a later wheel.
with tempfile.TemporaryDirectory(prefix="crowdnal-build-") as build_base:
    arguments: dict[str, Any] = {} if os.environ.get("CROWDNAL_NO_NATIVE") == "1" else native()
    arguments.setdefault("options", {})["build"] = {"build_base": build_base}
    setup(**arguments)
