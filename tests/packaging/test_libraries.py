"""The native libraries: what they need of torch, Python and the system, and when they are loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.installation import LIBRARIES, python

from crowdnal.ops import _load


def test_native_library_needs_only_the_stable_abi() -> None:
    if not LIBRARIES:
        assert os.environ.get("CROWDNAL_REQUIRE_NATIVE") != "1", "no native library was built"
        pytest.skip("this crowdnal was installed without a native library")
    if shutil.which("nm") is None:
        pytest.skip("nm (binutils) is not installed")
    for library in LIBRARIES:
        symbols = subprocess.run(
            ["nm", "-D", "--undefined-only", "--demangle", library],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "aoti_torch_abi_version" in symbols
        assert not re.findall(r".*\b(?:at|c10|torch)::.*", symbols)


# Functions of torch 2.10 (TORCH_TARGET in setup.py) in plain C, and names of dtypes and devices.
STABLE = re.compile(
    r"""aoti_torch_(dtype_\w+ | device_type_\w+ | memory_format_\w+ | layout_strided | abi_version | library_init_impl
        | empty_strided | new_tensor_handle | (create|delete)_device_guard | delete_(library|tensor)_object
        | is_contiguous | is_defined
        | get_(current_cuda_stream | device_index | device_type | dim | dtype | numel | size | stride))
    | torch_(call_dispatcher | delete_list | list_(get_item | size) | get_(const|mutable)_data_ptr | library_impl
        | parallel_for)""",
    re.VERBOSE,
)
LATER = {("torch_from_blob", "w")}
"""Of a later torch: weak, so null in 2.10, where the library does without."""
ELSEWHERE = re.compile(
    r".*@(GLIBC|GLIBCXX|CXXABI|GCC|libcudart)[._\d].*|_Z(N[KRO]*)?S.*|_ITM_\w+|__gmon_start__|__cxa_finalize"
)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_native_library_needs_nothing_that_a_supported_torch_or_python_lacks(library: Path) -> None:
    if shutil.which("nm") is None:
        pytest.skip("nm (binutils) is not installed")
    command = ["nm", "-D", "--undefined-only", "--format=posix", library]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = [line.split()[0] for line in lines if tuple(line.split()[:2]) not in LATER]
    assert len(names) > 40
    assert [name for name in names if not ELSEWHERE.fullmatch(name) and not STABLE.fullmatch(name)] == []


# Loading


@pytest.mark.quick(1)
@pytest.mark.parametrize("cuda", [True, False])
def test_only_a_cuda_build_of_torch_loads_the_cuda_library(tmp_path: Path, cuda: bool) -> None:
    code = f"""
import warnings; warnings.simplefilter("error")
import torch
if not {cuda}: torch.version.cuda = None
torch.ops.load_library = lambda path, load=torch.ops.load_library: (print(path.name), load(path))
import crowdnal
print(crowdnal.backend()["cuda"])
"""
    if not any(library.name.startswith("_cpu") for library in LIBRARIES):
        pytest.skip("this crowdnal was installed without a native library")
    *loaded, backend = python(code, tmp_path).split()
    built = cuda and any(library.name.startswith("_cuda") for library in LIBRARIES) and torch.version.cuda is not None
    names = [name.partition(".")[0] for name in loaded]
    assert names[0] == "_cpu" and [name.rstrip("0123456789") for name in names[1:]] == (["_cuda"] if built else [])
    assert backend == ("native" if built else "reference")


def test_a_cuda_library_that_cannot_be_loaded_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (tmp_path / "_cuda13.abi3.so").write_text("no library")
    monkeypatch.setattr(_load, "__file__", str(tmp_path / "ops" / "_load.py"))
    monkeypatch.setattr(_load, "_native", {"cpu"})
    failure = _load.load("cuda")
    assert failure is not None and failure.startswith("_cuda13.abi3.so cannot be loaded")
    assert "short" in failure or "ELF" in failure or "mach-o" in failure, "the reason is not told"
    assert _load.backend() == {"cpu": "native", "cuda": "reference"}
    assert _load.load("none") is None and _load.backend()["cuda"] == "reference"


def test_a_library_for_another_cuda_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_cuda13.abi3.so").touch()
    loaded: list[Path] = []
    monkeypatch.setattr(_load, "__file__", str(tmp_path / "ops" / "_load.py"))
    monkeypatch.setattr(_load, "_native", {"cpu"})
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    failure = _load.load("cuda")
    assert failure is not None and "_cuda13.abi3.so is not for CUDA 12.8" in failure
    assert not loaded and _load.backend()["cuda"] == "reference"
    monkeypatch.setattr(torch.version, "cuda", "13.1")
    assert _load.load("cuda") is None and loaded == [tmp_path / "_cuda13.abi3.so"]
    assert _load.backend()["cuda"] == "native"


@pytest.mark.slow
def test_disabled_native_runs_on_the_reference_and_warns_once(tmp_path: Path) -> None:
    code = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import crowdnal, crowdnal.ops
    backend = crowdnal.backend()
said = [str(warning.message) for warning in caught if "crowdnal" in str(warning.message)]
print(json.dumps([backend["cpu"], said]))
"""
    backend, said = json.loads(python(code, tmp_path, CROWDNAL_DISABLE_NATIVE="1"))
    assert backend == "reference"
    assert len(said) == 1 and "reference" in said[0]


# What is missing, and why


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a package without libraries."""
    monkeypatch.setattr(_load, "__file__", str(tmp_path / "ops" / "_load.py"))
    monkeypatch.setattr(_load, "_native", set())
    monkeypatch.delenv("CROWDNAL_DISABLE_NATIVE", raising=False)
    (tmp_path / "ops").mkdir()
    return tmp_path


class Registry:
    """In place of a `torch.library.Library`: kernels for CUDA by name."""

    def __init__(self) -> None:
        self.kernels: dict[str, Callable[..., Any]] = {}

    def impl(self, name: str, kernel: Callable[..., Any], key: str) -> None:
        assert key == "CUDA"
        self.kernels[name] = kernel


def test_a_wheel_of_a_failed_build_says_why_and_how_to_be_rid_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip keeps such a wheel and installs it again, whatever was put right since."""
    monkeypatch.setattr(torch.version, "cuda", None)
    (folder / "ops" / "not_built.json").write_text(json.dumps({"cpu": "there is no C++ compiler"}))
    with pytest.warns(UserWarning, match="there is no C\\+\\+ compiler.*pip cache remove crowdnal.*--force-reinstall"):
        _load.load_all(Registry(), {})  # type: ignore[arg-type]


def test_a_source_tree_without_a_library_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.warns(UserWarning, match="no native library was built; CROWDNAL_REQUIRE_NATIVE=1 pip install"):
        _load.load_all(Registry(), {})  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", ["no CUDA toolkit was found", None])
def test_who_has_a_gpu_hears_once_that_the_library_for_it_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reason: str | None
) -> None:
    """When CUDA tensors first meet an op, of whatever name, and not before."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_load, "_native", {"cpu"})
    monkeypatch.setattr(_load, "load", lambda device: None)
    if reason is not None:
        (folder / "ops" / "not_built.json").write_text(json.dumps({"cuda": reason}))
    registry = Registry()
    definitions: dict[str, Callable[..., Any]] = {"mix": lambda *x: ("mix", *x), "select": lambda *x: ("select", *x)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _load.load_all(registry, definitions)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=f"no library for CUDA was built.*{reason or 'REQUIRE_NATIVE'}") as caught:
        assert registry.kernels["mix"](1, 2) == ("mix", 1, 2)
        assert registry.kernels["mix"](1, 2) == ("mix", 1, 2)
        assert registry.kernels["select"](3) == ("select", 3)
    assert len(caught) == 1


@pytest.mark.parametrize("cuda", [True, False])
def test_definitions_stand_behind_cuda_only_where_no_library_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cuda: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0" if cuda else None)
    monkeypatch.setattr(_load, "_native", {"cpu", "cuda"} if cuda else {"cpu"})
    monkeypatch.setattr(_load, "load", lambda device: None)
    registry = Registry()
    _load.load_all(registry, {"mix": lambda: None})  # type: ignore[arg-type]
    assert registry.kernels == {}


def test_a_runtime_of_cpp_that_is_too_old_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conda's, often."""

    def load(path: Path) -> None:
        raise OSError(f"libstdc++.so.6: version `GLIBCXX_3.4.30' not found (required by {path})")

    (folder / "_cpu.abi3.so").touch()
    monkeypatch.setattr(torch.ops, "load_library", load)
    failure = _load.load("cpu")
    assert failure is not None and "GLIBCXX_3.4.30' not found" in failure and "libstdcxx-ng" in failure


def test_libraries_of_windows_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Path] = []
    (folder / "_cpu.pyd").touch()
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    assert _load.load("cpu") is None and loaded == [folder / "_cpu.pyd"]
