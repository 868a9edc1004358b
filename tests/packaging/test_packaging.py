"""What an installation must be: the right files, a stable ABI, light imports, and a backend that adapts."""

from __future__ import annotations

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

import pytest
from support.installation import LIBRARIES, PACKAGE, python

import crowdnal
from crowdnal._utils.extras import require
from crowdnal.ops import OPS

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
        known = file.suffix in {".py", ".pyc", ".pyd", ".so", ".typed"} or file.name == "not_built.json"
        assert file.parts[0] != "crowdnal" or known, file


def test_tag_tells_what_is_inside(installed: metadata.Distribution) -> None:
    wheel = installed.read_text("WHEEL") or ""
    assert ("Tag: cp311-abi3-" if LIBRARIES else "Tag: py3-none-any") in wheel


def test_version_is_said_once(installed: metadata.Distribution) -> None:
    assert installed.version == crowdnal.__version__


def test_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("native", [True, False])
def test_the_script_for_other_machines_tries_the_native_library(native: bool) -> None:
    if native and not LIBRARIES:
        pytest.skip("this crowdnal was installed without a native library")
    environment = {**os.environ, "CROWDNAL_DISABLE_NATIVE": "" if native else "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(PACKAGE.parent), str(ROOT / "tests")])
    command = [sys.executable, "-P", str(ROOT / "tests" / "installed.py"), "--native"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) == native, done.stderr
    assert not native or f"{len(OPS)} ops" in done.stdout


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


# The source archive


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
    build = {f"_build/{path.name}" for path in (ROOT / "_build").glob("*.py")}
    assert names >= sources | build | {"setup.py", "pyproject.toml", "LICENSE", "README.md"}
    assert not {name for name in names if name.endswith((".so", ".npy"))}
