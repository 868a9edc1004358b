"""The kernels under the sanitizers of gcc: AddressSanitizer with UndefinedBehaviorSanitizer, or ThreadSanitizer.

    python tests/sanitize.py address                     # the CPU library and the emulator, their tests
    python tests/sanitize.py thread                      # the CPU library on four threads
    python tests/sanitize.py address tests/ops -k mix    # what pytest is to run instead

Builds `csrc/cpu` in a temporary folder beside a copy of the package, and runs the tests of the ops on it, in which the
first finding ends the process. Torch itself is not instrumented. ThreadSanitizer does not know OpenMP: there, the
kernels' loops are on threads of the standard library (`emulation/threads.cpp`). Linux and gcc alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parent
CSRC = TESTS.parent / "csrc"
TORCH = Path(torch.__file__).parent
FLAGS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "thread": ["-fsanitize=thread"],
}
LIBRARIES = {"address": ("libasan.so", "libubsan.so", "libstdc++.so"), "thread": ("libtsan.so", "libstdc++.so")}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1:exitcode=66",
}
WHAT = {
    "address": ["tests/ops", "tests/functional", "tests/emulation"],
    "thread": ["tests/ops", "tests/functional/test_functional.py", "tests/functional/test_extremes.py"],
}
# other compilers and processes, time and memory: nothing of the kernels
LEFT_OUT = "not compile and not new_op and not memory_does_not_grow and not test_emulator and not allocated"


def build(kind: str, out: Path, jobs: int) -> None:
    """The CPU library with the sanitizer, as ``out``."""
    sources = [*sorted(CSRC.glob("cpu/**/*.cpp")), *([TESTS / "emulation/threads.cpp"] if kind == "thread" else [])]
    flags = ["-std=c++20", "-O1", "-g1", "-fno-omit-frame-pointer", "-fPIC", "-fvisibility=hidden", "-fopenmp-simd"]
    flags += [*FLAGS[kind], "-Wno-psabi", "-DTORCH_TARGET_VERSION=0x020a000000000000", f"-I{CSRC}"]
    flags += ["-isystem", str(TORCH / "include")]
    waiting, objects = list(sources), list[Path]()
    running: list[subprocess.Popen[bytes]] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            source = waiting.pop()
            objects.append(out.parent / f"{len(objects)}.o")
            running.append(subprocess.Popen(["g++", *flags, "-c", source, "-o", objects[-1]]))
        if running.pop(0).wait() != 0:
            raise SystemExit("the kernels do not compile")
    libraries = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10"]
    subprocess.run(["g++", "-shared", "-Wl,-Bsymbolic", *FLAGS[kind], *objects, *libraries, "-o", out], check=True)


def environment(kind: str, package: Path) -> dict[str, str]:
    """Sanitizer first of all libraries, the copy of the package first of all modules."""
    found = [subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
             for name in LIBRARIES[kind]]  # fmt: skip
    path = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        **OPTIONS,
        "LD_PRELOAD": " ".join(map(str.strip, found)),
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "CROWDNAL_EMULATOR_FLAGS": " ".join(FLAGS[kind]),
    }


def main() -> int:
    """Pytest's exit status, or the sanitizer's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=FLAGS)
    parser.add_argument("--jobs", type=int, default=1, help="of the compiler")
    parser.add_argument("--library", type=Path, help="keep the library as this file; used as it is if it is there")
    given, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="crowdnal-sanitize-") as folder:
        package = Path(folder)
        shutil.copytree(TESTS.parent / "crowdnal", package / "crowdnal", ignore=shutil.ignore_patterns("*.so", "*.pyc"))
        library = package / "crowdnal/_cpu.abi3.so"
        if given.library is None or not given.library.exists():
            build(given.kind, library, given.jobs)
            if given.library is not None:
                shutil.copy(library, given.library)
        else:
            shutil.copy(given.library, library)
        # -s: what a sanitizer says before it ends the process is seen
        tests = ["pytest", "-s", "-n", "0", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-m", "", *(
            rest or [*WHAT[given.kind], "-k", LEFT_OUT])]  # fmt: skip
        # -P: not the package of the working folder
        return subprocess.run(
            ["setarch", "-R", sys.executable, "-P", "-m", *tests],
            cwd=TESTS.parent,
            env=environment(given.kind, package),
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
