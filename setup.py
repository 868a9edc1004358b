"""The native library. This file builds it or fails; `_build/backend.py` decides what a failure means."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from glob import glob
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


def native() -> dict[str, Any]:
    """Arguments of `setup` that build the native library."""
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    check_compiler()
    cap_jobs()
    cpu = CppExtension(
        "crowdnal._cpu",
        ["csrc/ops.cpp", *sorted(glob("csrc/cpu/*.cpp"))],
        include_dirs=[os.path.abspath("csrc")],  # ninja runs elsewhere
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET)],
        extra_compile_args=["-O3", "-g0", "-fvisibility=hidden", "-fopenmp-simd", *VECTORIZE],
        py_limited_api=True,
    )
    return {
        "ext_modules": [cpu],
        "cmdclass": {"build_ext": BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp311"}},
    }


# A build folder that outlives the build would bring deleted modules back into a later wheel.
with tempfile.TemporaryDirectory(prefix="crowdnal-build-") as build_base:
    arguments: dict[str, Any] = {} if os.environ.get("CROWDNAL_NO_NATIVE") == "1" else native()
    arguments.setdefault("options", {})["build"] = {"build_base": build_base}
    setup(**arguments)
