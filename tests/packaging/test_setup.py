"""`setup.py`: what it asks setuptools for, and wheels that it makes."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
setuptools = pytest.importorskip("setuptools", minversion="77")
pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
Arguments = Callable[[], dict[str, Any]]


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> Arguments:
    """Runs setup.py; returns what it gives to `setuptools.setup`."""
    given: dict[str, Any] = {}
    for name in ("CROWDNAL_NO_NATIVE", "_CROWDNAL_FAILURES", "CXX", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CUDA_HOME", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS"):
        monkeypatch.setitem(os.environ, name, os.environ.get(name, ""))  # setup.py sets them
    monkeypatch.delenv("MAX_JOBS")
    monkeypatch.setenv("CROWDNAL_NO_CUDA", "1")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(setuptools, "setup", lambda **each: given.update(each))
    for name in ("compiler", "toolkit"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def run() -> dict[str, Any]:
        runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")
        return given

    return run


def test_one_binary_serves_every_python_from_3_11(arguments: Arguments) -> None:
    given = arguments()
    assert given["options"]["bdist_wheel"] == {"py_limited_api": "cp311"}
    assert [extension.py_limited_api for extension in given["ext_modules"]] == [True]
    assert int(os.environ["MAX_JOBS"]) >= 1


def test_free_threaded_python_has_no_limited_api(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    """There it is an error; the library, loaded by `torch.ops.load_library`, uses nothing of Python either way."""
    known = sysconfig.get_config_var
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else known(name))
    given = arguments()
    assert "bdist_wheel" not in given["options"]
    (cpu,) = given["ext_modules"]
    assert not cpu.py_limited_api and "torch_python" not in cpu.libraries and "torch_cpu" in cpu.libraries


def test_a_number_of_jobs_that_is_given_stays(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "7")
    arguments()
    assert os.environ["MAX_JOBS"] == "7"


def wheel(tree: Path, folder: Path, **variables: str) -> Path:
    """Made by the backend in a process of its own, as pip does it."""
    code = "import sys; sys.path.insert(0, '_build'); import backend; backend.build_wheel(sys.argv[1])"
    environment = {**os.environ, "_CROWDNAL_FAILURES": "", "CROWDNAL_REQUIRE_NATIVE": "", **variables}
    command = [sys.executable, "-P", "-c", code, str(folder)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    return made


def copy(tree: Path) -> Path:
    for name in ("_build", "crowdnal", "csrc"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tree)
    return tree


@pytest.mark.slow
def test_a_wheel_without_a_library_is_told_by_its_name_and_says_why(tmp_path: Path) -> None:
    """pip keeps it, and would install it again in silence once there is a compiler."""
    made = wheel(copy(tmp_path / "tree"), tmp_path, CXX="no-such-compiler")
    assert made.name.split("-")[2:] == ["0reference", "py3", "none", "any.whl"]
    with zipfile.ZipFile(made) as archive:
        why = json.loads(archive.read("crowdnal/ops/not_built.json"))
        assert not [name for name in archive.namelist() if name.endswith(".so")]
    assert list(why) == ["cpu"] and "no-such-compiler" in why["cpu"]


@pytest.mark.slow
def test_a_wheel_that_is_to_have_no_library_says_nothing(tmp_path: Path) -> None:
    made = wheel(copy(tmp_path / "tree"), tmp_path, CROWDNAL_NO_NATIVE="1")
    assert made.name.split("-")[2:] == ["py3", "none", "any.whl"]
    with zipfile.ZipFile(made) as archive:
        assert "crowdnal/ops/not_built.json" not in archive.namelist()


@pytest.mark.slow
def test_a_source_folder_of_any_name_is_built_and_nothing_is_written_into_it(tmp_path: Path) -> None:
    """A read-only one can be built, then."""
    tree = copy(tmp_path / "it's a földér")
    hasty = tmp_path / "hasty"
    hasty.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')
    hasty.chmod(0o755)
    before = {path: path.stat().st_mtime_ns for path in tree.rglob("*")}
    made = wheel(
        tree, tmp_path, CXX=str(hasty), CROWDNAL_NO_CUDA="1", CROWDNAL_REQUIRE_NATIVE="1", PYTHONDONTWRITEBYTECODE="1"
    )
    assert {path: path.stat().st_mtime_ns for path in tree.rglob("*")} == before
    assert made.name.split("-")[2:4] == ["cp311", "abi3"]
    with zipfile.ZipFile(made) as archive:
        assert [file for file in archive.namelist() if file.endswith(".so")] == ["crowdnal/_cpu.abi3.so"]
