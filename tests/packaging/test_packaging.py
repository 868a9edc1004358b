"""What an installation must be: the right files, a stable ABI, light imports, and a backend that adapts."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.installation import LIBRARIES, PACKAGE, python

import crowdnal
from crowdnal._utils.extras import require

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"matplotlib", "pandas", "rich", "sklearn", "timm"}
PROVIDED_AS = {"sklearn": "scikit-learn", "PIL": "pillow"}


@pytest.fixture
def installed() -> metadata.Distribution:
    """The installed distribution, when it is a copy and not a link to the checkout."""
    try:
        distribution = metadata.distribution("crowdnal")
    except metadata.PackageNotFoundError:
        pytest.skip("crowdnal is not installed")
    origin = json.loads(distribution.read_text("direct_url.json") or '{"dir_info": {"editable": true}}')
    if origin.get("dir_info", {}).get("editable"):
        pytest.skip("crowdnal is an editable installation")
    return distribution


# The installed package


def test_the_tests_run_against_the_installed_package(installed: metadata.Distribution) -> None:
    assert Path(str(installed.locate_file("crowdnal"))).resolve() == PACKAGE.resolve()


def test_only_the_package_is_installed(installed: metadata.Distribution) -> None:
    assert installed.files is not None
    for file in installed.files:
        own = file.parts[0] in {"crowdnal", f"crowdnal-{installed.version}.dist-info"}
        assert own or re.fullmatch(r"crowdnal(\.exe)?", file.name), file
        assert file.parts[0] != "crowdnal" or file.suffix in {".py", ".pyc", ".so", ".typed"}, file


def test_tag_tells_what_is_inside(installed: metadata.Distribution) -> None:
    wheel = installed.read_text("WHEEL") or ""
    assert ("Tag: cp311-abi3-" if LIBRARIES else "Tag: py3-none-any") in wheel


def test_version_is_said_once(installed: metadata.Distribution) -> None:
    assert installed.version == crowdnal.__version__


def test_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


# Imports


def test_import_is_light(tmp_path: Path) -> None:
    code = "import sys, torch; before = set(sys.modules); import crowdnal; print(*(set(sys.modules) - before))"
    loaded = {name.partition(".")[0] for name in python(code, tmp_path).split()}
    assert "crowdnal" in loaded
    assert not loaded & HEAVY


def test_require_returns_the_module() -> None:
    assert require("json.decoder", extra="train") is sys.modules["json.decoder"]


def test_require_names_the_extra() -> None:
    with pytest.raises(ImportError, match=re.escape('pip install "crowdnal[demo]"')) as caught:
        require("no_such_library.part", extra="demo")
    assert caught.value.name == "no_such_library.part"


def test_every_optional_import_is_in_the_extra_it_names() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    call = re.compile(r"""\brequire\(\s*["']([\w.]+)["'],\s*(?:extra=)?["'](\w+)["']""")
    for file in PACKAGE.rglob("*.py"):
        for module, extra in call.findall(file.read_text()):
            top = module.partition(".")[0]
            names = [re.split(r"[\s<>=!~;\[]", line)[0] for line in extras[extra]]
            assert PROVIDED_AS.get(top, top) in names, f"{file.name}: {module} is not in {extra}"


# The build backend


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`_build/backend.py` over a setuptools that builds nothing."""
    setuptools: Any = ModuleType("setuptools")
    setuptools.build_meta = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "setuptools", setuptools)
    monkeypatch.delenv("CROWDNAL_NO_NATIVE", raising=False)
    monkeypatch.delenv("CROWDNAL_REQUIRE_NATIVE", raising=False)
    spec = importlib.util.spec_from_file_location("crowdnal_build_backend", ROOT / "_build" / "backend.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
        ("2.9.1", ["ninja", "torch>=2.10"]),
        ("1.13.1", ["ninja", "torch>=2.10"]),
        (None, ["ninja", "torch>=2.10"]),
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
    def build(*args: object) -> str:
        if os.environ.get("CROWDNAL_NO_NATIVE") != "1":
            raise error
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

    monkeypatch.setenv("CROWDNAL_REQUIRE_NATIVE", "1")
    with pytest.raises(type(error)):
        backend.build_wheel("out")
    monkeypatch.setenv("CROWDNAL_NO_NATIVE", "1")
    assert backend.build_wheel("out") == "pure.whl"


def test_failed_cuda_build_leaves_the_cpu_library(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: object) -> str:
        if os.environ.get("CROWDNAL_NO_CUDA") != "1":
            raise RuntimeError("nvcc said no")
        return "pure.whl" if os.environ.get("CROWDNAL_NO_NATIVE") == "1" else "cpu.whl"

    monkeypatch.delenv("CROWDNAL_NO_CUDA", raising=False)
    monkeypatch.setattr(backend, "expose_torch", lambda: None)
    monkeypatch.setattr(backend.build_meta, "build_wheel", build, raising=False)
    assert backend.build_wheel("out") == "cpu.whl"
    assert os.environ["CROWDNAL_NO_CUDA"] != "1"


def test_source_archive_is_complete(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "tree"
    for name in ("_build", "crowdnal", "csrc", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tree)
    (tree / "crowdnal" / "_cpu.abi3.so").touch()
    (tree / "crowdnal" / "weights.npy").touch()
    code = "import sys; sys.path.insert(0, '_build'); import backend; print(backend.build_sdist(sys.argv[1]))"
    subprocess.run([sys.executable, "-P", "-c", code, tmp_path], cwd=tree, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    sources = {str(path.relative_to(tree)) for path in (tree / "csrc").rglob("*") if path.is_file()}
    assert names >= sources | {"_build/backend.py", "setup.py", "pyproject.toml", "LICENSE", "README.md"}
    assert not {name for name in names if name.endswith((".so", ".npy"))}
