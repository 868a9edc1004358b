"""`_build/compiler.py`: compilers that are not there or do not work, and limits of containers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from support.installation import build_module

GIB = 1 << 30
posix = pytest.mark.skipif(os.name == "nt", reason="the compiler is a shell script")


@pytest.fixture
def compiler() -> ModuleType:
    return build_module("compiler")


def script(folder: Path, text: str, name: str = "c++") -> str:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("version", ["2.10.0", "2.14.1+cpu"])
def test_a_compiler_that_works_is_not_refused(
    compiler: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    compiler.check(version)


def test_no_compiler_is_told(compiler: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(RuntimeError, match="there is no C\\+\\+ compiler: 'no-such-compiler -m64' is not found"):
        compiler.check("2.14.1")


@posix
@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("echo 'xcrun: error: invalid active developer path' >&2; exit 1", "xcrun: error: invalid active"),
        ("echo note >&2; echo \"c++: error: unrecognized option '-std=c++20'\" >&2; exit 1", "unrecognized option"),
        ("exit 3", "it said nothing"),
    ],
)
def test_a_compiler_that_does_not_work_is_told_with_what_it_says(
    compiler: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, told: str
) -> None:
    """The stub of macOS, and one that is too old for the standard that torch asks for."""
    monkeypatch.setenv("CXX", script(tmp_path, does))
    with pytest.raises(RuntimeError, match="does not work") as caught:
        compiler.check("2.14.1")
    assert told in str(caught.value) and "note" not in str(caught.value)


@posix
def test_a_compiler_is_tried_with_the_flags_and_the_standard_of_the_build(
    compiler: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path, f'echo "$@" >> {tmp_path}/given'))
    compiler.check("2.11.0")
    compiler.check("2.12.0a0+git")
    older, newer = (tmp_path / "given").read_text().splitlines()
    assert "-std=c++17" in older and "-std=c++20" in newer
    assert set(compiler.flags()) <= set(newer.split())


def test_windows_takes_what_has_vectors_of_a_given_size(compiler: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiler, "WINDOWS", True)
    assert compiler.compiler() == "clang-cl" and compiler.standard("2.14.1") == "/std:c++20"
    assert [flag for flag in compiler.flags() if not flag.startswith("/")] == []


# How many at once


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


VERSION_2, VERSION_1 = "0::/pod/build\n", "5:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n0::/\n"
V1_CPU = "sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(
    ("groups", "files", "memory", "cores"),
    [
        ("", {}, None, None),  # macOS
        ("0::/\n", {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None, None),
        ("0::/\n", {"sys/fs/cgroup/memory.max": f"{3 * GIB}\n"}, 3 * GIB, None),
        (VERSION_2, {"sys/fs/cgroup/pod/cpu.max": "150000 100000\n"}, None, 2),
        (VERSION_2, {"sys/fs/cgroup/pod/build/cpu.max": "50000 100000\n"}, None, 1),
        (VERSION_2, {"sys/fs/cgroup/pod/build/memory.max": f"{GIB}\n"}, GIB, None),
        (VERSION_1, {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n"}, GIB, None),  # as a container sees it
        (VERSION_1, {"sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, None, None),
        (VERSION_1, {f"{V1_CPU}/cpu.cfs_quota_us": "200000\n", f"{V1_CPU}/cpu.cfs_period_us": "100000\n"}, None, 2),
        (VERSION_1, {f"{V1_CPU}/cpu.cfs_quota_us": "-1\n", f"{V1_CPU}/cpu.cfs_period_us": "100000\n"}, None, None),
    ],
)
def test_limits_of_a_container_count(
    compiler: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    files: dict[str, str],
    memory: int | None,
    cores: int | None,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PHYS_PAGES": 256 * GIB // 4096}.get(name, 4096), raising=False)
    root = machine(tmp_path, groups, files)
    assert compiler.memory(root) == (memory or 256 * GIB)
    assert compiler.cores(root) == (cores or 64)
    assert compiler.jobs(root) == max(1, min(cores or 64, (memory or 256 * GIB) // (2 * GIB)))


def test_affinity_counts(compiler: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert compiler.jobs(tmp_path) == 1


def test_systems_without_sysconf_and_affinity_have_a_number_of_jobs(
    compiler: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sysconf", "sched_getaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert compiler.jobs(tmp_path) == 1
