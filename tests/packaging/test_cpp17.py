"""torch up to 2.11 compiles extensions as C++17, what came after as C++20: the kernels are both."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
CPU = sorted(CSRC.glob("cpu/**/*.cpp"))
INCLUDE = Path(torch.__file__).parent / "include"


def flags() -> list[str]:
    """As setup.py has them, but for the standard."""
    target = re.search(r'TORCH_TARGET = "(\w+)"', (ROOT / "setup.py").read_text())
    assert target is not None
    return ["-std=c++17", f"-DTORCH_TARGET_VERSION={target[1]}", f"-I{CSRC}", "-isystem", str(INCLUDE)]


def compiles(*command: str | Path) -> str:
    """What the compiler says, "" if nothing is wrong."""
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr + done.stdout


def checked(source: Path) -> str:
    strict = ["-pedantic-errors", "-Wno-psabi", "-fvisibility=hidden", "-fsyntax-only"]
    return compiles("g++", *flags(), *strict, source)


needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@needs_gcc
@pytest.mark.quick(2)
@pytest.mark.parametrize("source", CPU, ids=lambda source: source.stem)
def test_kernels_of_the_cpu(source: Path) -> None:
    assert checked(source) == ""


@needs_gcc
def test_what_is_newer_is_found(tmp_path: Path) -> None:
    newer = tmp_path / "newer.cpp"
    newer.write_text("auto same = []<class T>(T value) { return value; };\n")
    assert "c++20" in checked(newer).lower()


@pytest.mark.parametrize("source", sorted(CSRC.rglob("*.*")), ids=lambda source: source.name)
def test_no_name_is_a_macro_of_windows(source: Path) -> None:
    """Its headers, which torch's include, define these."""
    code = re.sub(r'//.*|"[^"\n]*"', "", source.read_text(encoding="utf-8"))
    assert (
        re.findall(r"\b(?:far|near|small|hyper|interface|IN|OUT|ERROR|OPTIONAL)\b", code) == []
        or source.suffix == ".md"
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None or torch.version.cuda is None, reason="needs nvcc")
@pytest.mark.parametrize("stem", ["select", "mix"])
def test_kernels_of_cuda(stem: str, tmp_path: Path) -> None:
    """A small family, and one that uses most of what lies in cuda/detail."""
    given = [
        *flags(),
        "-DUSE_CUDA",
        "-O0",
        "--expt-relaxed-constexpr",
        "-arch=sm_90",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
    ]
    assert compiles("nvcc", *given, "-c", CSRC / "cuda" / f"{stem}.cu", "-o", tmp_path / "out.o") == ""
