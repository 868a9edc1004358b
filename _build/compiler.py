"""The C++ compiler: which, with what flags, whether it works, and how many of it may run at once."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1] / "csrc"
BYTES_PER_JOB = 2 << 30
WINDOWS = sys.platform == "win32"
# Nothing reads errno or floating point exceptions: without them selections need no branches. Results are the same.
# Vectors wider than the processor's are passed between inlined functions only: no ABI to warn of.
VECTORIZE = ["-fopenmp-simd", "-fno-trapping-math", "-fno-math-errno", "-Wno-psabi"]


def compiler() -> str:
    """As torch takes it, but that MSVC has no vectors of a given size: on Windows it is clang's twin of it."""
    return os.environ.get("CXX") or ("clang-cl" if WINDOWS else "c++")


def flags() -> list[str]:
    """Of the CPU library, without torch's own."""
    if WINDOWS:
        return ["/O2", "/EHsc", *(f"/clang:{flag}" for flag in ("-O3", *VECTORIZE))]
    return ["-O3", "-g0", "-fvisibility=hidden", *VECTORIZE]


def standard(torch_version: str) -> str:
    """The flag that torch adds: C++17 up to 2.11, then C++20."""
    older = tuple(map(int, torch_version.split(".")[:2])) < (2, 12)
    return f"{'/std:' if WINDOWS else '-std='}c++{17 if older else 20}"


def first_error(said: str) -> str:
    """Of what a compiler prints, the first line that says what is wrong."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["it said nothing"]
    return next((line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)), lines[0])


def check(torch_version: str) -> None:
    """Compiles and links what asks most of a compiler, the header of the vectors.

    Raises:
        RuntimeError: There is no compiler, or it does not work; with the first line of what it said.
    """
    command = shlex.split(compiler(), posix=not WINDOWS)
    if shutil.which(command[0]) is None:
        raise RuntimeError(f"there is no C++ compiler: {compiler()!r} is not found (CXX names another one)")
    with tempfile.TemporaryDirectory(prefix="crowdnal-check-") as folder:
        source = Path(folder, "check.cpp")
        source.write_text('#include "cpu/detail/simd.h"\n', encoding="utf-8")
        out = ["/LD", f"/Fe{folder}\\check.dll"] if WINDOWS else ["-shared", "-fPIC", "-o", f"{folder}/check.so"]
        command += [*flags(), standard(torch_version), f"-I{CSRC}", str(source), *out]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise RuntimeError(f"the C++ compiler {compiler()!r} cannot be run: {error}") from error
    if done.returncode != 0:
        said = first_error(done.stderr + done.stdout)
        raise RuntimeError(f"the C++ compiler {compiler()!r} does not work (g++ 12 and clang 14 do): {said}")


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


def _control_groups(root: Path) -> Iterator[Path]:
    """The control groups (versions 1 and 2) that this process is in, each followed by those around it."""
    for line in _words(root / "proc/self/cgroup"):
        controllers, _, path = line.partition(":")[2].partition(":")
        mount = root / "sys/fs/cgroup" / controllers
        group = mount / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(mount))


def memory(root: Path = Path("/")) -> float:
    """Bytes that this process may use: those of the machine, or of a container."""
    bounds = [math.inf]
    if hasattr(os, "sysconf"):
        bounds.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for group in _control_groups(root):
        for file in ("memory.max", "memory.limit_in_bytes"):
            bounds += [int(word) for word in _words(group / file) if word.isdigit()]
    return min(bounds)


def cores(root: Path = Path("/")) -> int:
    """Processors that this process may use: by its affinity, and by the quota of a container."""
    affinity = getattr(os, "sched_getaffinity", None)
    bounds: list[float] = [(len(affinity(0)) if affinity else os.cpu_count()) or 1]
    for group in _control_groups(root):
        quota = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if len(quota) == 2 and all(word.isdigit() for word in quota):
            bounds.append(int(quota[0]) / int(quota[1]))
    return max(1, math.ceil(min(bounds)))


def jobs(root: Path = Path("/")) -> int:
    """Compilations at once."""
    return int(max(1, min(cores(root), memory(root) // BYTES_PER_JOB)))
