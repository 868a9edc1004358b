"""`_build/toolkit.py`: which nvcc serves, and for what it compiles."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest
from support.installation import build_module

pytestmark = pytest.mark.skipif(os.name == "nt", reason="nvcc is a shell script")


@pytest.fixture
def toolkit() -> ModuleType:
    return build_module("toolkit")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CUDA 13.0, which dropped Volta, as `CUDA_HOME`."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    (tmp_path / "include").mkdir()
    codes = "\\n".join(f"sm_{number}" for number in (75, 80, 86, 90, 100, 103, 120))
    nvcc.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = --list-gpu-code ]; then printf "{codes}\\n"; fi\n'
        'if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.88"; fi\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    return tmp_path


def test_the_toolkit_of_the_environment_is_found(toolkit: ModuleType, home: Path) -> None:
    found = toolkit.find("13.1")
    assert found.home == home and found.version == (13, 0)


def test_another_major_version_and_none_are_told(
    toolkit: ModuleType, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LookupError, match=r"release 13\.0, torch was built with CUDA 12\.8"):
        toolkit.find("12.8")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "absent"))
    with pytest.raises(LookupError, match="no CUDA toolkit"):
        toolkit.find("13.0")


DEFAULT = "8.0;9.0;10.0+PTX"


@pytest.mark.parametrize(
    ("named", "taken", "told"),
    [
        (None, DEFAULT, ""),
        ("", DEFAULT, ""),
        ("8.0;9.0", "8.0;9.0", ""),
        ("6.0 7.0 7.5 8.0 9.0a 10.0+PTX", "7.5;8.0;9.0a;10.0+PTX", "6.0, 7.0"),
        ("7.0;", DEFAULT, f"7.0: left out, which leaves none: the default is taken, {DEFAULT}"),
        ("13.0+PTX;8.0", "8.0", "13.0+PTX"),
        ("Hopper", "Hopper", ""),
    ],
)
def test_architectures_that_nvcc_dropped_are_left_out_by_name(
    toolkit: ModuleType,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    named: str | None,
    taken: str,
    told: str,
) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    if named is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", named)
    assert toolkit.architectures(toolkit.find("13.0")) == taken
    said = capsys.readouterr().out
    assert told in said and said.count("\n") == (1 if told else 0)


def test_an_nvcc_that_lists_nothing_drops_nothing(
    toolkit: ModuleType, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = toolkit.find("13.0")
    (home / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0")
    assert toolkit.architectures(found) == "7.0"


def test_older_toolkits_know_no_blackwell(toolkit: ModuleType) -> None:
    assert toolkit.Toolkit(Path("cuda"), (12, 6)).default_architectures == "8.0;9.0+PTX"
