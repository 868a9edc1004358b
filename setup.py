"""The native libraries. This file builds them or fails; `_build/backend.py` decides what a failure means.

One for the CPU, and one for CUDA where torch is a CUDA build and its compiler is there; no GPU is needed to build.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import tempfile
from glob import glob
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, os.path.abspath("_build"))  # only a build backend has it there
import compiler  # noqa: E402
import toolkit  # noqa: E402

TORCH_TARGET = "0x020a000000000000"  # the stable ABI of torch 2.10: one binary for it and all later ones
# Free-threaded Python has no stable ABI; that of the libraries, which call nothing of Python, is the same.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")

missing: dict[str, str] = json.loads(
    os.environ.get("_CROWDNAL_FAILURES") or "{}"
)  # why, of the backend's last attempts


class BuildPackage(build_py):
    """Leaves in a wheel why it lacks a library, for the warning at import."""

    def run(self) -> None:
        super().run()
        if missing and not self.editable_mode:
            Path(self.build_lib, "crowdnal/ops/not_built.json").write_text(json.dumps(missing), encoding="utf-8")


def find_cuda() -> toolkit.Toolkit | None:
    """The toolkit, if it can compile for the installed torch."""
    import torch

    if torch.version.cuda is None or os.environ.get("CROWDNAL_NO_CUDA") == "1":
        return None
    try:
        return toolkit.find(torch.version.cuda)
    except LookupError as error:
        missing["cuda"] = str(error)
        print(f"crowdnal: CUDA tensors will be served by the reference: {error}", flush=True)
        return None


def native() -> dict[str, Any]:
    """Arguments of `setup` that build the native libraries."""
    import torch

    compiler.check(torch.__version__)
    if compiler.WINDOWS:
        os.environ["CXX"] = compiler.compiler()  # torch would take MSVC
    os.environ.setdefault("MAX_JOBS", str(compiler.jobs()))
    cuda = find_cuda()
    if cuda is not None:  # torch reads both when it is asked for flags, and without them looks for a GPU
        os.environ["CUDA_HOME"] = str(cuda.home)
        os.environ["TORCH_CUDA_ARCH_LIST"] = toolkit.architectures(cuda)
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    includes = [os.path.abspath("csrc")]  # ninja runs elsewhere
    cpu = CppExtension(
        "crowdnal._cpu",
        sorted(glob("csrc/cpu/**/*.cpp", recursive=True)),
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET)],
        include_dirs=[*includes],
        extra_compile_args=compiler.flags(),
        py_limited_api=LIMITED_API,
    )
    extensions = [cpu]
    if cuda is not None:
        host = ["/O2"] if compiler.WINDOWS else ["-O3", "-g0"]
        hidden = [] if compiler.WINDOWS else ["-Xcompiler=-fvisibility=hidden"]
        extensions.append(
            CUDAExtension(
                f"crowdnal._cuda{cuda.version[0]}",  # with the major version, as the loader expects
                sorted(glob("csrc/cuda/*.cu")),
                define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET), ("USE_CUDA", None)],
                include_dirs=[*includes],
                extra_compile_args={"cxx": host, "nvcc": ["-O3", *hidden]},
                py_limited_api=LIMITED_API,
            )
        )
    for extension in extensions:  # what torch links where there is no stable ABI
        extension.libraries = [library for library in extension.libraries if library != "torch_python"]
    options = {"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED_API else {}
    return {"ext_modules": extensions, "cmdclass": {"build_ext": BuildExtension}, "options": options}


# A build folder that outlives the build would bring deleted modules back into a later wheel.
with tempfile.TemporaryDirectory(prefix="crowdnal-build-") as build_base:
    arguments: dict[str, Any] = {} if os.environ.get("CROWDNAL_NO_NATIVE") == "1" else native()
    arguments.setdefault("cmdclass", {})["build_py"] = BuildPackage
    options = arguments.setdefault("options", {})
    options["build"] = {"build_base": build_base}
    if "sdist" not in sys.argv:  # which lists what lies in the source folder; that of a wheel may be read-only
        options["egg_info"] = {"egg_base": build_base}
    if missing:  # pip keeps the wheel, and takes it again: its name tells what is not in it
        tag = "0reference" if "cpu" in missing else "0cpu"
        options.setdefault("bdist_wheel", {})["build_number"] = tag
    setup(**arguments)
