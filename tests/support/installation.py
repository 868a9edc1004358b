"""Where the package lies, and a new interpreter that imports it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import crowdnal

PACKAGE = Path(crowdnal.__file__).parent
LIBRARIES = sorted([*PACKAGE.glob("_c*.so"), *PACKAGE.glob("_c*.pyd")])


def python(code: str, cwd: Path, **env: str) -> str:
    """Runs code in a new interpreter that does not see the working directory's packages."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def build_module(name: str) -> ModuleType:
    """A module of `_build`, anew."""
    file = Path(__file__).resolve().parents[2] / "_build" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"crowdnal_build_{name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
