"""PEP 517 backend: setuptools, plus what a package that compiles against torch needs.

Under build isolation pip hides the packages of the environment, so a build requirement on torch would
download another copy of it. This backend looks for torch where the running interpreter keeps its packages
and builds against that one; only where there is none, or one too old, does it ask for torch. A native
library that cannot be built leaves a package that runs on the reference implementation.

Where torch is a CUDA build and there is an nvcc, a second library serves CUDA; if that one fails to build, the CPU's is
built without it.

CROWDNAL_NO_NATIVE=1 skips the native libraries, CROWDNAL_NO_CUDA=1 the CUDA one; CROWDNAL_REQUIRE_NATIVE=1 makes a
failure an error.
"""

from __future__ import annotations

import os
import re
import site
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import metadata, util
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from setuptools import build_meta

MIN_TORCH = (2, 10)
BUILD_REQUIREMENTS = ["ninja"]  # objects compile in parallel
PACKAGE = Path(__file__).resolve().parents[1] / "crowdnal"
WARNING = """
*** crowdnal: THE NATIVE LIBRARY WAS NOT BUILT: {error}
*** The package is installed without it and runs on the reference implementation, which is slower.
*** CROWDNAL_REQUIRE_NATIVE=1 pip install -v ... makes this an error and shows the compiler's output.
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
    return list(dict.fromkeys(folders))


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
    return [*BUILD_REQUIREMENTS, "torch>={}.{}".format(*MIN_TORCH)]  # as pip will do for the installed package


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
def without(what: str) -> Iterator[None]:
    variable = f"CROWDNAL_NO_{what}"
    before = os.environ.get(variable, "")
    os.environ[variable] = "1"
    try:
        yield
    finally:
        os.environ[variable] = before


def with_native(build: Callable[[], str]) -> str:
    """Run a build with the native libraries; should that fail, without the CUDA one, then without any."""
    if is_skipped():
        return build()
    failure: BaseException | None = None
    for attempt in (nullcontext(), without("CUDA")):
        try:
            with attempt:
                expose_torch()
                return build()
        except (Exception, SystemExit) as error:
            if os.environ.get("CROWDNAL_REQUIRE_NATIVE") == "1":
                raise
            traceback.print_exc()
            failure = error
    print(WARNING.format(error=failure), file=sys.stderr, flush=True)
    with without("NATIVE"):
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


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    return with_native(lambda: build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    for library in PACKAGE.glob("_c*.so"):  # an old one must not outlive a build that fails
        library.unlink()
    return with_native(
        lambda: build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    )
