"""What a method costs inside a real training step.

    python benchmarks/training.py ccc [--json FILE] [--quick]
    python benchmarks/training.py overhead [--json FILE] [--quick]

ccc: a step of CCC in plain CrowdLayer steps, per model, on timm's resnet18 from scratch (float32), by the way in which
the gradient of the corrections is found. All forms run interleaved in one process; the numbers are medians. Rows: form,
plain_steps, plain_steps_processor_time (which other processes move less), seconds, peak_bytes (most bytes alive at once
of those that a step allocates, gradients included, from the events of torch's CPU allocator), target,
cores_busy_elsewhere (by other processes, while the forms were timed: with more than a fraction of a core plain_steps
means little).

overhead: what a head adds to a training step of timm's resnet18 (64 items, float32): its loss, backward and update,
less those of the plain cross-entropy, as a share of the plain step. Rows: objective, seconds (of the head), overhead,
target.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import torch

BENCHMARKS = ("ccc", "overhead")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="small, few turns: does it run, not what it costs")
    parser.add_argument("--json", type=Path, help="write machine, setting and rows here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    benchmark = importlib.import_module(f"_training.{arguments.benchmark}")
    found: dict[str, Any] = benchmark.run(arguments.quick)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
