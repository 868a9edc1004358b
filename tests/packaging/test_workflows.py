"""cibuildwheel's configuration and the workflows: that they name what exists, and agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))["jobs"]


def test_one_wheel_per_platform() -> None:
    wheels = PROJECT["tool"]["cibuildwheel"]
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=").replace(".", "")
    assert wheels["build"] == f"cp{oldest}-*"
    assert {system: wheels[system]["archs"] for system in ("linux", "macos", "windows")} == {
        "linux": ["native"],
        "macos": ["arm64"],
        "windows": ["AMD64"],
    }
    for system in ("macos", "linux"):  # torch brings its own libraries
        excluded = wheels[system]["repair-wheel-command"]
        assert "--exclude" in excluded and "libtorch" in excluded and "libc10" in excluded
    for each in (wheels, wheels["windows"]):
        assert each["environment"]["CROWDNAL_REQUIRE_NATIVE"] == "1", "a wheel without a library would be published"


def test_wheels_are_built_with_what_the_build_system_asks_for() -> None:
    before = PROJECT["tool"]["cibuildwheel"]["before-build"]
    assert f'"{PROJECT["build-system"]["requires"][0]}"' in before and "ninja" in before
    assert '"torch==2.10.0"' in before  # the oldest, as TORCH_TARGET in setup.py
    assert "of torch 2.10" in (ROOT / "setup.py").read_text(encoding="utf-8")


def test_wheels_for_cuda_have_its_major_version_in_their_name() -> None:
    job = jobs("wheels.yml")["cuda"]
    for variant in job["strategy"]["matrix"]["include"]:
        assert variant["image"].startswith(f"cuda{variant['major']}.")
    rename = next(step["run"] for step in job["steps"] if "sed" in step.get("run", ""))
    pattern, replacement = re.findall(r"s/(.*)/(.*)/", rename)[0]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    python = re.sub(r"\\([()])", r"\1", pattern)
    renamed = re.sub(python, replacement.replace("${{ matrix.major }}", "13"), text, flags=re.MULTILINE)
    assert tomllib.loads(renamed)["project"]["version"] == PROJECT["project"]["version"] + "+cu13"


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_files_that_a_workflow_runs_exist(file: Path) -> None:
    named = re.findall(r"(?:tests|\.ci|_build)/[\w./]+", file.read_text(encoding="utf-8"))
    for path in [*named, "tests/installed.py"]:
        assert (ROOT / path).exists(), path
