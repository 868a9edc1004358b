"""Fresh virtual environments in which crowdnal is built, installed and tried: `python tests/packaging/environments.py`.

By default the oldest Python with the oldest torch that are supported, and the newest of both that are found; `--every`
adds each Python between, with the newest torch. In each, pip installs torch, then crowdnal, which compiles against that
torch; `tests/installed.py` tries every op of it, and then of the wheel that the first environment built. Some gigabytes
are downloaded where torch is a CUDA build.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLDEST_TORCH = "torch==2.10.0"
OLDEST_PYTHON = (3, 11)
Python = tuple[tuple[int, int], str]


def interpreters() -> list[Python]:
    """Versions that are supported and found, on the PATH or as pyenv has them; the oldest first."""
    found: dict[tuple[int, int], str] = {sys.version_info[:2]: sys.executable}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*pyenv.glob("3.*/bin/python"), *(shutil.which(f"python3.{minor}") for minor in range(11, 20))]
    for candidate in filter(None, candidates):
        code = "import sys; print(*sys.version_info[:2])"
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True)
        if done.returncode == 0:
            major, minor = map(int, done.stdout.split())
            found.setdefault((major, minor), str(candidate))
    return sorted((version, path) for version, path in found.items() if version >= OLDEST_PYTHON)


def run(*command: str | Path, log: Path, cwd: Path, **variables: str) -> str:
    """Runs it; what it prints goes to `log`, and to the screen when it fails."""
    environment = {**os.environ, "PYTHONPATH": "", **variables}
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    log.write_text(done.stdout, encoding="utf-8")
    if done.returncode != 0:
        print(done.stdout[-8000:], flush=True)
        raise SystemExit(f"failed: {' '.join(map(str, command))}")
    return done.stdout


def attempt(python: Python, torch: str, folder: Path, wheels: Path) -> None:
    """One environment, from nothing."""
    began = time.monotonic()
    run(python[1], "-m", "venv", folder, log=wheels / "log", cwd=wheels)
    own = str(folder / ("Scripts" if os.name == "nt" else "bin") / "python")
    pip, check = (own, "-m", "pip", "install"), (own, "-P", ROOT / "tests" / "installed.py", "--native")
    tests = {"PYTHONPATH": str(ROOT / "tests")}
    run(*pip, torch, "numpy", "typing_extensions", "pytest", "hypothesis", log=wheels / "log", cwd=wheels)
    built = folder / "built"
    wheel = (own, "-m", "pip", "wheel", "-v", "--no-deps", "-w", built, ROOT)
    said = run(*wheel, log=wheels / "log", cwd=wheels, CROWDNAL_REQUIRE_NATIVE="1")
    against = re.search(r"building against torch (\S+) in (.*)", said)
    assert against is not None and Path(against[2].strip()).is_relative_to(folder.resolve()), "another torch was used"
    first = next(wheels.glob("*.whl"), None)
    for each in filter(None, (*built.glob("*.whl"), first)):
        run(*pip, "--force-reinstall", "--no-deps", each, log=wheels / "log", cwd=wheels)
        print("of the first environment: " if each == first else "", end="")
        print(run(*check, log=wheels / "log", cwd=wheels, **tests).strip(), flush=True)
    if first is None:
        shutil.copy(*built.glob("*.whl"), wheels)
    print(f"Python {python[0]}, {torch}: {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", action="store_true", help="each Python between the oldest and the newest, too")
    parser.add_argument("--newest", default="torch", metavar="SPEC", help="requirement on torch for all but the first")
    every, newest = (arguments := parser.parse_args()).every, arguments.newest
    pythons = interpreters()
    print("found:", ", ".join(f"{version[0]}.{version[1]} ({path})" for version, path in pythons), flush=True)
    matrix = [(pythons[0], OLDEST_TORCH)]
    matrix += [(python, newest) for python in (pythons if every else pythons[-1:])]
    with tempfile.TemporaryDirectory(prefix="crowdnal-environments-") as base:
        wheels = Path(base, "wheels")
        wheels.mkdir()
        for number, (python, torch) in enumerate(matrix):
            folder = Path(base, str(number))
            attempt(python, torch, folder, wheels)
            shutil.rmtree(folder)
    print(f"{len(matrix)} environments: crowdnal was built, installed and tried in each")


if __name__ == "__main__":
    main()
