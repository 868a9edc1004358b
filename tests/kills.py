"""`crowdnal train` killed by SIGKILL at random moments: its folder is loadable, and `--resume` ends with the same bits.

    python tests/kills.py --kills 200

Runs of a tiny model are forked from this process, so that a run takes a second. Each is killed one to four times,
resumed after every kill, then left to end, and compared with a run that was never killed. Exit status 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch  # noqa: E402
from support import small_run  # noqa: E402

from crowdnal.cli import main as crowdnal_main  # noqa: E402


def start(arguments: list[str]) -> int:
    """The command in a process of its own; returns the id."""
    child = os.fork()
    if child:
        return child
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    status = 99
    try:
        status = crowdnal_main(arguments) or 0
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    finally:
        os._exit(status)


def ended(child: int) -> bool:
    """Whether it has ended, and well."""
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise SystemExit(f"a run ended with status {os.WEXITSTATUS(status)}")
    return os.WIFEXITED(status)


def loadable(out: Path) -> None:
    """What lies in the folder can be read."""
    if (out / "run.json").exists():
        json.loads((out / "run.json").read_text())
    if (out / "checkpoint.pt").exists():
        torch.load(out / "checkpoint.pt", weights_only=True)


def main() -> int:
    """Prints the count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, kills, runs, wrong = random.Random(given.seed), 0, 0, []
    with tempfile.TemporaryDirectory(prefix="crowdnal-kills-") as folder:
        root = small_run.write(Path(folder) / "data")
        makers = {"frozen": small_run.frozen, "whole": small_run.config}
        whole, seconds = {}, {}
        for name, make in makers.items():
            whole[name] = Path(folder) / name
            began = time.monotonic()
            ended(start(small_run.arguments(make(root, whole[name]))))
            seconds[name] = time.monotonic() - began
        while kills < given.kills:
            name, out = rng.choice(sorted(makers)), Path(folder) / f"run{runs}"
            arguments, resume = small_run.arguments(makers[name](root, out)), []
            for _ in range(rng.randint(1, 4)):
                child = start(arguments + resume)
                time.sleep(rng.random() * 1.2 * seconds[name])
                os.kill(child, signal.SIGKILL)
                kills += not ended(child)
                loadable(out)
                resume = ["--resume"] if (out / "run.json").exists() else []
            ended(start(arguments + resume))
            runs += 1
            if not small_run.same_weights(out, whole[name]):
                wrong.append(f"run {runs} ({name})")
            print(f"{kills} kills in {runs} runs, {len(wrong)} differ", flush=True)
    print(f"{kills} kills in {runs} runs; not as without: {', '.join(wrong) or 'none'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
