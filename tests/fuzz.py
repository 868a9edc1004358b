"""Malformed and extreme input, by the thousand: a crash, a hang, a silent wrong result, somebody else's exception.

    python tests/fuzz.py --cases 100000            # in child processes; prints every fault with what repeats it
    python tests/fuzz.py --layers ops --only 1234  # one case again

Cases are seeded: the number of a case and --seed make it. Exit status 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from support.fuzz import LAYERS, case_of, fault  # noqa: E402

HANG = 120.0
"""Seconds after which a case hangs."""


def run_here(layer: str, seed: int, first: int, last: int, told: bool) -> int:
    """Cases first..last-1; `told`: says the number of each before it is run, so that a crash has a name."""
    faults = 0
    for number in range(first, last):
        if told:
            print(f"case {number}", flush=True)
        case = case_of(layer, seed, number)
        wrong = fault(case)
        if wrong is not None:
            faults += 1
            print(f"fault {layer} {number}: {case.what}: {wrong}", flush=True)
    return faults


def run_in_children(layer: str, seed: int, cases: int) -> Counter[str]:
    """The same in a process, and in another one behind a case that ended it."""
    counts, first = Counter(tried=cases), 0
    while first < cases:
        command = [sys.executable, "-W", "ignore", __file__, "--layers", layer, "--seed", str(seed), "--child"]
        child = subprocess.Popen([*command, str(first), str(cases)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        number, heard, rest = first, time.monotonic(), b""
        while True:
            done, read = child.poll() is not None, child.stdout.read() or b""
            *lines, rest = (rest + read).split(b"\n")
            for line in map(bytes.decode, lines):
                heard = time.monotonic()
                if line.startswith("case "):
                    number = int(line.split()[1])
                else:
                    counts["faults"] += 1
                    print(line, flush=True)
            if done or time.monotonic() - heard > HANG:
                break
            time.sleep(0.02)
        if child.poll() is None:
            child.kill()
        if child.wait() in (0, 1):
            break
        counts["ended the process"] += 1
        what = f"{layer} {number}: {case_of(layer, seed, number).what}"
        print(f"fault {what}: {'hangs' if child.returncode == -9 else f'exit {child.returncode}'}", flush=True)
        first = number + 1
    return counts


def main() -> int:
    """Prints the counts of each layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="of all layers together")
    parser.add_argument("--layers", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this case alone, in this process")
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only is not None:
        print(case_of(given.layers[0], given.seed, given.only).what)
        return int(run_here(given.layers[0], given.seed, given.only, given.only + 1, False) > 0)
    if given.child:
        return int(run_here(given.layers[0], given.seed, *given.child, True) > 0)
    total: Counter[str] = Counter()
    for layer in given.layers:
        began = time.monotonic()
        counts = run_in_children(layer, given.seed, given.cases // len(given.layers))
        print(f"{layer}: {dict(counts)} in {time.monotonic() - began:.0f} s", flush=True)
        total += counts
    print(f"all: {dict(total)}")
    return int(total["faults"] + total["ended the process"] > 0)


if __name__ == "__main__":
    sys.exit(main())
