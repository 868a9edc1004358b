"""The build backend: against which torch it builds, and what a failure leaves."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from support.installation import build_module

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`_build/backend.py` over a setuptools that builds nothing."""
    setuptools: Any = ModuleType("setuptools")
    setuptools.build_meta = SimpleNamespace(__file__="elsewhere/setuptools/build_meta.py")
    monkeypatch.setitem(sys.modules, "setuptools", setuptools)
    monkeypatch.delenv("CROWDNAL_NO_NATIVE", raising=False)
    monkeypatch.delenv("CROWDNAL_REQUIRE_NATIVE", raising=False)
    return build_module("backend")


def site_with_torch(folder: Path, version: str, *, package: bool = True, listed: bool = True) -> str:
    """A site-packages folder in which some torch is installed."""
    folder.mkdir()
    if package:
        (folder / "torch").mkdir()
        (folder / "torch" / "__init__.py").write_text("raise AssertionError('must not be imported')\n")
    if listed:
        info = folder / f"torch-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return str(folder)


def test_torch_is_found_without_importing_it(backend: ModuleType, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    first = site_with_torch(tmp_path / "first", "2.12.0+cu130")
    second = site_with_torch(tmp_path / "second", "2.14.1")
    assert backend.find_torch([str(empty), first, second]) == ("2.12.0+cu130", first)
    assert backend.find_torch([str(empty), str(tmp_path / "absent")]) is None


def test_remains_of_torch_do_not_count(backend: ModuleType, tmp_path: Path) -> None:
    removed = site_with_torch(tmp_path / "removed", "2.12.0", package=False)
    unknown = site_with_torch(tmp_path / "unknown", "2.12.0", listed=False)
    assert backend.find_torch([removed, unknown]) is None


def test_own_site_folder_is_searched(backend: ModuleType) -> None:
    torch = metadata.distribution("torch").locate_file("")
    if not Path(str(torch)).is_relative_to(sys.prefix):
        pytest.skip("torch is not installed in this environment")
    assert backend.find_torch(backend.site_folders()) is not None


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.10.0", ["ninja"]),
        ("2.10.0a0+gitabc", ["ninja"]),
        ("3.0.1+cpu", ["ninja"]),
        ("2.9.1", ["ninja", "torch>2.9.999"]),
        ("1.13.1", ["ninja", "torch>2.9.999"]),
        (None, ["ninja", "torch>2.9.999"]),
    ],
)
def test_torch_is_asked_for_only_where_there_is_none(
    backend: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str | None,
    expected: list[str],
) -> None:
    folders = [] if version is None else [site_with_torch(tmp_path / "site", version)]
    monkeypatch.setattr(backend, "site_folders", lambda: folders)
    assert backend.get_requires_for_build_wheel() == expected
    assert backend.get_requires_for_build_editable() == expected
    assert backend.get_requires_for_build_sdist() == []
    monkeypatch.setenv("CROWDNAL_NO_NATIVE", "1")
    assert backend.get_requires_for_build_wheel() == []


@pytest.mark.parametrize(
    "version",
    ["2.9.1", "2.9.1+cu128", "2.10.0a0+b558c98.nv25.12", "2.10.0.dev20251101+cu130", "2.10.0", "2.15.0", "3.0.0rc1"],
)
def test_package_and_backend_agree_on_a_torch(backend: ModuleType, version: str) -> None:
    """NVIDIA's containers have 2.10.0a0+...: below 2.10, so that pip would put another in its place."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = (name for name in project["dependencies"] if name.startswith("torch"))
    assert needed == backend.REQUIREMENT
    specifier = Requirement(needed).specifier
    assert specifier.contains(version, prereleases=True) == backend.is_supported(version)
    assert not specifier.prereleases, "pip would fetch pre-releases"


@pytest.mark.skipif(os.name == "nt", reason="where folders do not tell for which Python they are")
@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX", "PATH", "base"])
def test_a_build_in_an_environment_of_its_own_takes_torch_of_the_active_one(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """As uv and `python -m build` make them: setuptools lies in it; pip's lies elsewhere, and pip's prefix is right."""
    build, active, base = (tmp_path / name for name in ("build", "active", "base"))
    owner = base if variable == "base" else active
    (site,) = backend.site.getsitepackages([str(owner)])[:1]
    Path(site).parent.mkdir(parents=True)
    site_with_torch(Path(site), "2.13.0")
    active.mkdir(exist_ok=True)
    (active / "pyvenv.cfg").touch()
    monkeypatch.setattr(sys, "prefix", str(build))
    monkeypatch.setattr(sys, "base_prefix", str(base))
    monkeypatch.setattr(backend.site, "PREFIXES", [str(build)])
    monkeypatch.setattr(backend.sysconfig, "get_path", lambda name: str(build / "site-packages"))
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", os.pathsep.join([str(build / "bin"), "/usr/bin"]))
    if variable == "PATH":
        monkeypatch.setenv("PATH", os.pathsep.join([str(build / "bin"), str(active / "bin")]))
    elif variable != "base":
        monkeypatch.setenv(variable, str(active))
    assert backend.find_torch(backend.site_folders()) is None  # pip's
    backend.build_meta.__file__ = str(build / "site-packages" / "setuptools" / "build_meta.py")
    assert backend.find_torch(backend.site_folders()) == ("2.13.0", site)
    assert backend.get_requires_for_build_wheel() == ["ninja"]


@pytest.mark.parametrize(
    ("version", "error"),
    [("2.11.0", None), ("2.9.1", "torch 2.9.1 is installed, 2.10 or"), (None, "not installed")],
)
def test_installed_torch_goes_last_on_the_path(
    backend: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str | None,
    error: str | None,
) -> None:
    folders = [] if version is None else [site_with_torch(tmp_path / "site", version)]
    monkeypatch.setattr(backend, "site_folders", lambda: folders)
    monkeypatch.setattr(backend, "util", SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "build-environment")])
    if error is None:
        backend.expose_torch()
        assert sys.path == [str(tmp_path / "build-environment"), *folders]
    else:
        with pytest.raises(RuntimeError, match=error):
            backend.expose_torch()


@pytest.mark.parametrize("error", [RuntimeError("c++ said no"), SystemExit("error: c++ said no")])
def test_failed_native_build_leaves_a_package_and_a_warning(
    backend: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
) -> None:
    told: list[Any] = []

    def build(*args: object) -> str:
        if os.environ.get("CROWDNAL_NO_NATIVE") != "1":
            raise error
        told.append(json.loads(os.environ["_CROWDNAL_FAILURES"] or "{}"))
        return "pure.whl"

    monkeypatch.setattr(backend, "expose_torch", lambda: None)
    monkeypatch.setattr(backend, "PACKAGE", tmp_path)
    monkeypatch.setattr(backend.build_meta, "build_wheel", build, raising=False)
    monkeypatch.setattr(backend.build_meta, "build_editable", build, raising=False)
    stale = tmp_path / "_cpu.abi3.so"
    stale.touch()

    assert backend.build_wheel("out") == "pure.whl"
    assert "NOT BUILT" in (said := capsys.readouterr().err) and "c++ said no" in said
    assert backend.build_editable("out") == "pure.whl"
    assert not stale.exists()
    assert told == 2 * [{"cpu": str(error)}]  # for the warning at import

    monkeypatch.setenv("CROWDNAL_REQUIRE_NATIVE", "1")
    with pytest.raises(type(error)):
        backend.build_wheel("out")
    monkeypatch.setenv("CROWDNAL_NO_NATIVE", "1")
    assert backend.build_wheel("out") == "pure.whl"


def test_failed_cuda_build_leaves_the_cpu_library(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: object) -> str:
        if os.environ.get("CROWDNAL_NO_CUDA") != "1":
            raise RuntimeError("nvcc said no")
        assert json.loads(os.environ["_CROWDNAL_FAILURES"]) == {"cuda": "nvcc said no"}
        return "pure.whl" if os.environ.get("CROWDNAL_NO_NATIVE") == "1" else "cpu.whl"

    monkeypatch.delenv("CROWDNAL_NO_CUDA", raising=False)
    monkeypatch.setattr(backend, "expose_torch", lambda: None)
    monkeypatch.setattr(backend.build_meta, "build_wheel", build, raising=False)
    assert backend.build_wheel("out") == "cpu.whl"
    assert os.environ["CROWDNAL_NO_CUDA"] != "1"
