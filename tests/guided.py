"""Files whose bytes atheris changes so that they reach new branches of the readers: an error of ours, or annotations.

    pip install atheris && python tests/guided.py --seconds 600

Begins with the samples of `support/fuzz_files.py`. Prints every kind of fault once; exit status 1 if there is one.
Atheris is no requirement of the tests: what it found is a test by itself.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import tempfile
from pathlib import Path

import atheris  # type: ignore[import-not-found]

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

with atheris.instrument_imports(include=["crowdnal.data"]):
    import crowdnal.data  # noqa: F401

from support.fuzz import Case, fault  # noqa: E402
from support.fuzz_files import read, samples  # noqa: E402


def main() -> None:
    """Ends the process, as atheris does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    given = parser.parse_args()
    known, kinds, tried = list(samples().values()), set[str](), 0

    def one(data: bytes) -> None:
        nonlocal tried
        tried += 1
        sample = known[data[0] % len(known)] if data else known[0]
        wrong = fault(Case("", lambda: read(data[1:], sample.options)))
        if wrong is not None and wrong[:60] not in kinds:
            kinds.add(wrong[:60])
            print(f"fault: {wrong}: read(bytes.fromhex({data[1:].hex()!r}), {sample.options})", flush=True)

    def told() -> None:
        print(f"{tried} files, {len(kinds)} kinds of faults", flush=True)
        if kinds:
            os._exit(1)

    atexit.register(told)
    with tempfile.TemporaryDirectory() as folder:
        for number, sample in enumerate(known):
            (Path(folder) / str(number)).write_bytes(bytes([number]) + sample.content)
        atheris.Setup([sys.argv[0], folder, f"-max_total_time={given.seconds}", "-max_len=4096", "-timeout=60"], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
