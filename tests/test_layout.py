"""How the tests are laid out: folders that mirror the package, nothing that one test module takes from another."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import crowdnal

TESTS = Path(__file__).parent
MODULES = sorted(TESTS.rglob("test_*.py"))
FOLDERS = {folder.name for folder in TESTS.iterdir() if folder.is_dir() and list(folder.rglob("test_*.py"))}
BESIDE = {"benchmarks", "cuda", "emulation", "packaging"}  # of what is no package of crowdnal
SCRIPTS = {"environments.py", "fuzz.py", "guided.py", "installed.py", "kills.py", "pinned.py", "sanitize.py"}
UNTESTED = {"reference", "cli", "multilabel"}  # tested as what the ops must give; in train; in objectives/lia


def imported(file: Path) -> set[str]:
    """First and second part of every absolute import."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} is a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


@pytest.mark.parametrize("file", sorted(TESTS.rglob("*.py")), ids=lambda file: str(file.relative_to(TESTS)))
def test_no_module_imports_a_test_module(file: Path) -> None:
    names = {module.stem for module in MODULES} | {"conftest"}
    assert not [name for name in imported(file) if names & set(name.split("."))]


def test_what_is_shared_lies_in_support() -> None:
    helpers = [f for f in TESTS.rglob("*.py") if not f.name.startswith(("test_", "conftest")) and f.name not in SCRIPTS]
    assert {file.parent for file in helpers} == {TESTS / "support"}
    assert len({module.stem for module in MODULES}) == len(MODULES), "two test modules of one name"


def test_folders_mirror_the_package() -> None:
    package = Path(crowdnal.__file__).parent
    rooms = {path.stem for path in package.iterdir() if not path.name.startswith("_") and path.suffix in ("", ".py")}
    assert FOLDERS == (rooms - UNTESTED) | BESIDE
    loose = {module.stem.removeprefix("test_") for module in TESTS.glob("test_*.py")}
    assert loose == {"architecture", "compare", "fuzz", "layout", "pinned", "readme", "reports"}


def test_tensors_are_compared_by_what_shows_the_worst_element() -> None:
    """`support.compare`, not those of torch and NumPy, which show less."""
    others = ("torch.testing.assert", "np.testing.assert_all")
    users = {m.relative_to(TESTS).as_posix() for m in MODULES if any(o in m.read_text("utf-8") for o in others)}
    assert users == {"test_compare.py", "test_layout.py"}
