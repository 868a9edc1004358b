"""Reading a long table against pandas' own reading of the columns it needs: seconds and peak memory.

    python benchmarks/reading.py [--quick] [--rows N] [--per-item N] [--annotators N] [--repeats N] [--json FILE]

Tables are made in a temporary folder: CSV and Parquet, by task and shuffled, five labels per item, with a column that
nobody needs. Every reading is a process of its own, so that memory is its own too; the best of the repeats counts.
pandas reads with its defaults (`usecols=`, `columns=`), and stops where ours begins to number ids; its defaults also
take 007 for 7.

JSON: rows, machine, and for each file its bytes, pandas and crowdnal with seconds, cpu_seconds (of all threads) and
peak_extra_bytes (beyond the imports), and ours by theirs: seconds_ratio, cpu_ratio, memory_ratio. Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from _machine import describe

NEEDED = ["task", "worker", "label"]
READ = {
    "pandas": "pandas.read_parquet(path, columns={needed}) if path.endswith('parquet') else "
    "pandas.read_csv(path, usecols={needed})",
    "crowdnal": "crowdnal.Annotations.read(path)",
}
MEASURE = """
import re, sys, time
import pandas, pyarrow.csv, pyarrow.parquet, crowdnal
path = sys.argv[1]
def memory(name):  # getrusage's peak is that of the process this one was forked from
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(name + r":\s+(\d+)", file.read())[1])
before, start, busy = memory("VmRSS"), time.perf_counter(), time.process_time()
found = {read}
print(time.perf_counter() - start, time.process_time() - busy, memory("VmHWM") - before)
"""


def main() -> None:
    arguments = parse()
    report: dict[str, Any] = {"benchmark": "reading", "rows": arguments.rows, "machine": describe(), "files": {}}
    with tempfile.TemporaryDirectory() as folder:
        for path in write(Path(folder), arguments.rows, arguments.per_item, arguments.annotators):
            found = {name: measure(read, path, arguments.repeats) for name, read in READ.items()}
            ours, theirs = found["crowdnal"], found["pandas"]
            found |= {
                "bytes": path.stat().st_size,
                "seconds_ratio": ours["seconds"] / theirs["seconds"],
                "cpu_ratio": ours["cpu_seconds"] / theirs["cpu_seconds"],
                "memory_ratio": ours["peak_extra_bytes"] / max(theirs["peak_extra_bytes"], 1),
            }
            report["files"][path.name] = found
            print(
                f"{path.name}: pandas {theirs['seconds']:.2f} s, {theirs['peak_extra_bytes'] / 1e6:.0f} MB; crowdnal "
                f"{ours['seconds']:.2f} s, {ours['peak_extra_bytes'] / 1e6:.0f} MB; {found['seconds_ratio']:.2f} times "
                f"the time ({found['cpu_ratio']:.2f} times the CPU's), {found['memory_ratio']:.2f} times the memory",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def write(folder: Path, rows: int, per_item: int, annotators: int) -> list[Path]:
    generator = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {
            "task": pandas.Series(np.arange(rows) // per_item).map("img_{:08d}.jpg".format),
            "worker": pandas.Series(generator.integers(0, annotators, rows)).map("w{}".format),
            "label": np.array(["cat", "cow", "dog", "pig"])[generator.integers(0, 4, rows)],
            "seconds": generator.random(rows).round(2),
        }
    )
    paths = []
    for name, table in (("by_task", frame), ("shuffled", frame.sample(frac=1, random_state=0))):
        paths += [folder / f"{name}.csv", folder / f"{name}.parquet"]
        table.to_csv(paths[-2], index=False)
        table.to_parquet(paths[-1], index=False)
    return paths


def measure(read: str, path: Path, repeats: int) -> dict[str, float]:
    """The best of several processes."""
    code = MEASURE.format(read=read.format(needed=NEEDED))
    runs = []
    for _ in range(repeats):
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
        runs.append([float(number) for number in done.stdout.split()])
    return dict(zip(("seconds", "cpu_seconds", "peak_extra_bytes"), map(min, zip(*runs, strict=True)), strict=True))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000, metavar="N", help="default 10,000,000")
    parser.add_argument("--per-item", type=int, default=5, metavar="N", help="labels of an item, default 5")
    parser.add_argument("--annotators", type=int, default=5000, metavar="N", help="default 5,000")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default 3")
    parser.add_argument("--quick", action="store_true", help="20,000 rows, once")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.repeats = 20_000, 1
    return arguments


if __name__ == "__main__":
    main()
