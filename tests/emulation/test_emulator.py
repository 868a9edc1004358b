"""The emulator itself: what it computes, what it refuses, and mistakes planted in a copy of a kernel."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import emulated


@pytest.fixture(scope="module")
def misuse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulated.program("misuse", tmp_path_factory.mktemp("misuse"))


def run(program: Path, *args: str) -> list[str]:
    done = subprocess.run([program, *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def shuffled(t: int) -> int:
    down = t + 30 if t % 32 < 2 else t
    up = t - 3 if t % 4 == 3 else t
    return ((t ^ 1) * 100 + t // 8 * 8 + 2) * 10_000 + down * 100 + up


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("reverse", [63 - t for t in range(64)]),
        ("reverse_dynamic", [63 - t for t in range(64)]),
        ("reverse_lanes", [t // 32 * 32 + 31 - t % 32 for t in range(64)]),
        ("shuffles", [shuffled(t) for t in range(64)]),
        ("ballot", [7] * 32 + [6] * 32),
        ("groups", [100 * (4 * (t // 4 * 4) + 6 if t // 4 % 2 else t) + 8 for t in range(64)]),
    ],
)
def test_right_use(misuse: Path, name: str, wanted: list[int]) -> None:
    assert [[int(v) for v in line.split()] for line in run(misuse, name)] == [wanted] * 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_barrier", "shared memory is "),  # read before it is written, or with no barrier: whichever comes first
        ("warp_barrier_between_warps", "shared memory is "),
        ("overwrite", "written with no barrier since another thread read it|read with no barrier since another"),
        ("two_writers", "written by two threads with no barrier"),
        ("beyond", r"out of bounds: \[64\] of 64 \(misuse.cpp:\d+"),
        ("beyond_dynamic", r"out of bounds: \[64\] of 64"),
        ("unwritten", "read before it is written"),
        ("divergent", "divergent barrier: from thread 0 at misuse.cpp:.* from thread 40 returned"),
        ("two_barriers", "divergent barrier: from thread 0 at .* from thread 32 at"),
        ("lane_missing", "divergent barrier: .* from thread 7 returned"),
        ("lane_outside", "leaves it out"),
        ("crossed", "lanes of a warp wait at different warp operations"),
        ("refused", "assertion failed"),
    ],
)
def test_wrong_use_is_an_error_in_every_order(misuse: Path, name: str, message: str) -> None:
    lines = run(misuse, name)
    assert len(lines) == 3
    for line in lines:
        pytest.raises(RuntimeError, _raise, line).match(message)


def _raise(message: str) -> None:
    raise RuntimeError(message)


def planted(folder: Path, before: str, after: str) -> Path:
    """A copy of the sources with one mistake in the kernels of mix_annotators."""
    csrc = folder / "csrc"
    for name in ("common", "cuda"):
        shutil.copytree(emulated.CSRC / name, csrc / name)
    kernels = csrc / "cuda" / "detail"
    texts = {kernel: kernel.read_text() for kernel in (kernels / f"{name}outer.cuh" for name in ("", "small_"))}
    assert sum(text.count(before) for text in texts.values()) == 1
    for kernel, text in texts.items():
        kernel.write_text(text.replace(before, after))
    return csrc


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("// the rows are read", "// the rows are read (a comment changes nothing)", "right"),
        ("        __syncthreads();\n        T part[16]", "        T part[16]", "shared memory is .*outer.cuh"),
        slow("__syncthreads();  // the rows are read", "", "shared memory is .*outer.cuh"),
        slow(
            "e < (stop - j) * kAcross; e += kBlockThreads",
            "e <= (stop - j) * kAcross; e += kBlockThreads",
            r"shared memory is read before it is written \(outer.cuh",
        ),
        slow(
            "      __syncwarp();\n      stage<T, V>(staged, z0",
            "      stage<T, V>(staged, z0",
            "shared memory is .*small_outer.cuh",
        ),
    ],
    ids=[
        "nothing",
        "missing barrier",
        "missing barrier between groups",
        "off by one",
        "missing barrier of a warp",
    ],
)
def test_planted_mistakes_are_caught(tmp_path: Path, before: str, after: str, message: str) -> None:
    (line,) = run(emulated.program("outer", tmp_path, planted(tmp_path, before, after)))
    pytest.raises(RuntimeError, _raise, line).match(message)


@pytest.mark.slow
def test_every_kernel_stays_in_its_arrays(tmp_path: Path) -> None:
    """Under AddressSanitizer. Memory of the emulator's own threads is told apart by its annotations of fibers."""
    program = emulated.program("all", tmp_path, flags=["-g1", "-fsanitize=address"])
    assert run(program) == ["done"]


@pytest.mark.slow
def test_sanitizer_sees_one_element_too_many(tmp_path: Path) -> None:
    csrc = planted(tmp_path, "if (c < shape.rows && aligned", "if (c <= shape.rows && aligned")
    program = emulated.program("outer", tmp_path, csrc, ["-g1", "-fsanitize=address"])
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr
