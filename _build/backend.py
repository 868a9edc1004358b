"""PEP 517 backend: setuptools, plus what a package that compiles against torch needs.

Under build isolation pip hides the packages of the environment, so a build requirement on torch would
download another copy of it. This backend looks for torch where the running interpreter keeps its packages, or,
where uv or `python -m build` made an environment for the build alone, in the active one and that of the base
interpreter, and builds against that one; only where there is none, or one too old, does it ask for torch. A native
library that cannot be built leaves a package that runs on the reference implementation.

Where torch is a CUDA build and there is an nvcc, a second library serves CUDA; if that one fails to build, the CPU's is
built without it.

CROWDNAL_NO_NATIVE=1 skips the native libraries, CROWDNAL_NO_CUDA=1 the CUDA one; CROWDNAL_REQUIRE_NATIVE=1 makes a
failure an error.
"""

from __future__ import annotations

import json
import os
import re
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import metadata, util
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from setuptools import build_meta

MIN_TORCH = (2, 10)
REQUIREMENT = "torch>2.9.999"  # as pyproject.toml: with the pre-releases of 2.10 (NVIDIA's 2.10.0a0), fetching none
BUILD_REQUIREMENTS = ["ninja"]  # objects compile in parallel
PACKAGE = Path(__file__).resolve().parents[1] / "crowdnal"
WARNING = """
*** crowdnal: THE NATIVE LIBRARY WAS NOT BUILT: {error}
*** The package is installed without it and runs on the reference implementation, which is slower.
*** CROWDNAL_REQUIRE_NATIVE=1 pip install -v ... makes this an error and shows the compiler's output.
*** Once the cause is put right: pip cache remove crowdnal (pip keeps what it built), then install again.
"""

Settings = dict[str, Any] | None


class Torch(NamedTuple):
    version: str
    folder: str


def is_supported(version: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and tuple(map(int, numbers.groups())) >= MIN_TORCH


def site_folders() -> list[str]:
    """Where this interpreter keeps installed packages, in the order of its own search path.

    A virtual environment made with --system-site-packages counts the folders of its base, too.
    """
    folders = site.getsitepackages()
    if sys.prefix == sys.base_prefix:
        folders.insert(0, site.getusersitepackages())
    elif is_temporary():
        folders += site.getsitepackages(outer_environments())
    return list(dict.fromkeys(folders))


def is_temporary() -> bool:
    """Whether the interpreter's environment was made for this build: setuptools lies in it, as pip's does not."""
    own = sysconfig.get_path("purelib")
    return Path(str(build_meta.__file__)).is_relative_to(own)


def outer_environments() -> list[str]:
    """Prefixes of the environments that a build in an environment of its own may be meant for, the active one first."""
    if os.name == "nt":  # where a folder of packages does not tell for which Python it is
        return []
    named = [os.environ.get(name, "") for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    on_path = [Path(folder).parent for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    named += [str(prefix) for prefix in on_path if (prefix / "pyvenv.cfg").is_file()]
    return [prefix for prefix in (*named, sys.base_prefix) if prefix not in ("", sys.prefix)]


def find_torch(folders: Iterable[str]) -> Torch | None:
    """The first torch that lies in one of the folders, found without importing it."""
    for folder in folders:
        if PathFinder.find_spec("torch", [folder]) is not None:
            for distribution in metadata.distributions(name="torch", path=[folder]):
                return Torch(distribution.version, folder)
    return None


def is_skipped() -> bool:
    return os.environ.get("CROWDNAL_NO_NATIVE") == "1"


def requirements() -> list[str]:
    """What pip must bring for the native library; nothing where it will not be built."""
    if is_skipped():
        return []
    torch = find_torch(site_folders())
    if torch is not None and is_supported(torch.version):
        return BUILD_REQUIREMENTS
    return [*BUILD_REQUIREMENTS, REQUIREMENT]  # as pip will do for the installed package


def expose_torch() -> None:
    """Make the torch of the environment importable, behind everything of the build environment.

    Raises:
        RuntimeError: There is no torch, or it is too old for the stable ABI.
    """
    if util.find_spec("torch") is None:
        torch = find_torch(site_folders())
        if torch is None:
            raise RuntimeError("torch is not installed")
        sys.path.append(torch.folder)
    version = metadata.version("torch")
    if not is_supported(version):
        raise RuntimeError("torch {} is installed, {}.{} or later is needed".format(version, *MIN_TORCH))
    folder = metadata.distribution("torch").locate_file("")
    print(f"crowdnal: building against torch {version} in {folder}", flush=True)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name, "") for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.update(before)


def without(what: str) -> AbstractContextManager[None]:
    return environment(**{f"CROWDNAL_NO_{what}": "1"})


def tell(failures: dict[str, str]) -> AbstractContextManager[None]:
    """For setup.py: why which library is left out of the wheel; the warning at import will say it."""
    return environment(_CROWDNAL_FAILURES=json.dumps(failures))


def reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


def with_native(build: Callable[[], str]) -> str:
    """Run a build with the native libraries; should that fail, without the CUDA one, then without any."""
    if is_skipped():
        return build()
    failures: dict[str, str] = {}
    for library in ("cuda", "cpu"):  # which is to blame if this attempt fails
        try:
            with without("CUDA") if failures else nullcontext(), tell(failures):
                expose_torch()
                return build()
        except (Exception, SystemExit) as error:
            if os.environ.get("CROWDNAL_REQUIRE_NATIVE") == "1":
                raise
            traceback.print_exc()
            failures[library] = reason(error)
    print(WARNING.format(error=failures["cpu"]), file=sys.stderr, flush=True)
    with without("NATIVE"), tell({"cpu": failures["cpu"]}):
        return build()


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return requirements()


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return requirements()


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    return []


# Metadata and source archives need neither torch nor a compiler.


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    with without("NATIVE"):
        return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None) -> str:
    with without("NATIVE"):
        return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    with without("NATIVE"):
        return build_meta.build_sdist(sdist_directory, config_settings)


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    return with_native(lambda: build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    for library in [*PACKAGE.glob("_c*.so"), *PACKAGE.glob("_c*.pyd")]:  # must not outlive a build that fails
        library.unlink()
    return with_native(lambda: build_meta.build_editable(wheel_directory, config_settings, metadata_directory))
