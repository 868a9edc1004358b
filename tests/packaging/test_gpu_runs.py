"""A run of the tests on a GPU tests the kernels, or says why not; tried without one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.native import not_of_the_kernels

import crowdnal

TESTS = Path(__file__).resolve().parents[1]


def test_the_reference_in_place_of_the_kernels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu, backend, told in ((True, "reference", True), (True, "native", False), (False, "reference", False)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        monkeypatch.setattr(crowdnal, "backend", lambda backend=backend: {"cuda": backend})
        assert (not_of_the_kernels() is not None) == told


def first_parts(*parts: str, tests: Path = TESTS, **more: str) -> subprocess.CompletedProcess[str]:
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(folders), **more}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = ["bash", tests / "gpu.sh", *parts]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def built_tree(root: Path) -> Path:
    """What the script's first part leaves: a checkout, and in it the libraries that are tested here."""
    (root / "crowdnal").symlink_to(Path(crowdnal.__file__).parent)
    shutil.copy(TESTS.parent / "pyproject.toml", root)
    for folder in ("tests", "benchmarks"):
        shutil.copytree(TESTS.parent / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    return root


@pytest.mark.slow
@pytest.mark.skipif(crowdnal.backend()["cpu"] != "native", reason="the script wants a native library")
def test_what_to_run_first_goes_through_without_a_gpu(tmp_path: Path) -> None:
    tests = built_tree(tmp_path) / "tests"
    done = first_parts("backend", "right", "smoke", "memcheck", tests=tests, DEVICE="cpu", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("=== ")]
    assert told == ["backend", "right", "smoke", "memcheck"]
    assert not json.loads((tmp_path / "gpu-smoke.json").read_text())["unfinished"]


def test_the_first_part_that_fails_is_named() -> None:
    done = first_parts("nothing", "smoke")
    assert done.returncode == 2 and "--- nothing failed (2)" in done.stdout and "smoke" not in done.stdout


@pytest.mark.slow
def test_every_test_of_the_kernels_fails_where_the_reference_would_serve() -> None:
    code = """
import sys, torch, pytest, crowdnal
torch.cuda.is_available = lambda: True
crowdnal.backend = lambda: {"cpu": "native", "cuda": "reference"}
sys.exit(pytest.main(["-m", "cuda", "-q", "-p", "no:cacheprovider", "cuda/test_cuda_half.py"]))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=TESTS, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1 and "would be tested in place of the kernels" in done.stdout, done.stdout + done.stderr
    assert " passed" not in done.stdout and " skipped" not in done.stdout
