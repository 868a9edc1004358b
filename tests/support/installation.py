"""Where the package lies, and a new interpreter that imports it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import crowdnal

PACKAGE = Path(crowdnal.__file__).parent
LIBRARIES = sorted(PACKAGE.glob("_c*.so"))


def python(code: str, cwd: Path, **env: str) -> str:
    """Runs code in a new interpreter that does not see the working directory's packages."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
