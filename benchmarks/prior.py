"""What the prior of confusions costs a step: objectives with `confusion_prior=`, and without.

    python benchmarks/prior.py [--quick] [--objectives crowd-layer,trace] [--cells labelme,medical] [--threads 2]
                               [--json F]

Per objective and cell, in one process, interleaved: medians of a step (the loss of a batch from logits, and its
backward through autograd) in microseconds. Ratio: the median of one with the prior as a multiple of one without, turn
by turn. Penalties of the objectives are 0, so that what is timed are the likelihood and the prior.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from _formulations import Cell, Problem, read_arguments
from _machine import OtherProcesses, describe, timed

from crowdnal import objectives

SECONDS = 1.0  # of a cell
STRENGTH = 20.0
OPTIONS: dict[str, dict[str, Any]] = {
    "crowd-layer": {},
    "trace": {"trace_weight": 0.0},
    "geocrowdnet": {"volume_weight": 0.0},
    "single-confusion": {"penalty_weight": 0.0},
}


def main() -> None:
    arguments, wanted, cells = read_arguments(__doc__, "objectives", list(OPTIONS))
    rows = []
    print("{:17} {:9} {:>10} {:>10} {:>6}   us".format("objective", "cell", "without", "with", "ratio"))
    for name in wanted:
        for cell in cells:
            row = measure(name, cell, 0.05 if arguments.quick else SECONDS)
            rows.append(row)
            print("{objective:17} {cell:9} {without:10.1f} {with:10.1f} {ratio:6.2f}".format(**row), flush=True)
    if arguments.json:
        result = {"benchmark": "prior", "quick": arguments.quick, "machine": describe(), "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(name: str, cell: Cell, seconds: float) -> dict[str, Any]:
    """Medians of a cell, in microseconds."""
    p = Problem(cell, lambda problem: [problem.normal(problem.B, problem.C)], torch.float32)
    mean = 0.5 * torch.eye(p.C) + 0.5 / p.C
    steps = {"without": step(name, p, None), "with": step(name, p, STRENGTH * mean)}
    others = OtherProcesses()
    once = sum(timed(way, 1) for way in steps.values())
    times: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(max(5, min(2000, int(seconds / once)))):
        for way, run in steps.items():
            times[way].append(timed(run, 1))
    row: dict[str, Any] = {way: 1e6 * statistics.median(taken) for way, taken in times.items()}
    row["ratio"] = statistics.median(a / b for a, b in zip(times["with"], times["without"], strict=True))
    return {"objective": name, "cell": cell.name, **row, "cores_busy_elsewhere": others.cores()}


def step(name: str, p: Problem, prior: torch.Tensor | None) -> Callable[[], None]:
    """A step on the cell's batch, of which training started."""
    sizes = {"num_classes": p.C, "num_annotators": p.R}
    objective = objectives.create(name, **sizes, confusion_prior=prior, **OPTIONS[name])
    objective.on_train_start(p.annotations)
    (logits,) = p.leaves

    def run() -> None:
        objective.zero_grad(set_to_none=True)
        logits.grad = None
        objective(logits, p.annotations).backward()

    run()
    return run


if __name__ == "__main__":
    main()
