"""The cross-entropy's gradients made with the loss, against the two ops (forward, then backward) that it replaces.

    python benchmarks/one_pass.py [--quick] [--cells labelme,medical] [--threads 2] [--json F]

Per cell, in one process, interleaved, medians in microseconds: the native calls alone (`native`: one against two), and
a step (`step`: the loss and its backward through autograd). Ratio: one pass as a share of the two ops.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _formulations import GRID, Cell, Problem
from _machine import OtherProcesses, describe, timed
from _softmax import leaves

from crowdnal.ops import softmax_link as ops

SECONDS = 2.0  # of a cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cell, few turns")
    parser.add_argument("--cells", default="", help=f"of {', '.join(cell.name for cell in GRID)}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write machine and rows here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = arguments.cells.split(",") if arguments.cells else [cell.name for cell in GRID]
    rows = []
    print(f"{'cell':10} {'two ops':>9} {'one':>9} {'ratio':>6} {'step, two':>10} {'step, one':>10} {'ratio':>6}   us")
    for cell in GRID[:1] if arguments.quick else [cell for cell in GRID if cell.name in names]:
        row = measure(cell, 0.05 if arguments.quick else SECONDS)
        rows.append(row)
        shown = [row[key] for key in ("native_two", "native_one", "native_ratio", "step_two", "step_one", "step_ratio")]
        print("{:10} {:9.1f} {:9.1f} {:6.2f} {:10.1f} {:10.1f} {:6.2f}".format(cell.name, *shown), flush=True)
    if arguments.json:
        result = {"benchmark": "one_pass", "quick": arguments.quick, "machine": describe(), "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(cell: Cell, seconds: float) -> dict[str, Any]:
    """Medians of a cell, in microseconds."""
    p = Problem(cell, leaves, torch.float32)
    a = p.annotations
    scores, confusion = (leaf.detach().requires_grad_() for leaf in p.leaves)
    index = (a.indptr, a.item, a.annotator, a.order, None)
    inputs = (scores.detach(), confusion.detach(), None, None, None, *index, a.label)
    one, needs = torch.ones(()), (True, True, False, False)

    def native_two() -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            _, _, probs = ops.softmax_link.overload(*inputs, True)
            return ops.softmax_link_backward.overload(one, None, *inputs, probs, True, *needs)

    def native_one() -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return ops.softmax_link_step.overload(*inputs, True, *needs)[2:]

    def stepped(loss: Callable[[], torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        def step() -> list[torch.Tensor]:
            scores.grad = confusion.grad = None
            loss().backward()
            return [scores.grad, confusion.grad]  # type: ignore[list-item]

        return step

    ways: dict[str, Callable[[], Any]] = {
        "native_two": native_two,
        "native_one": native_one,
        "step_two": stepped(lambda: ops.softmax_link(scores, confusion, *inputs[2:], True)[0]),
        "step_one": stepped(lambda: ops.softmax_link_step(scores, confusion, *inputs[2:], True, *needs)[0]),
    }
    expected = [gradient.clone() for gradient in native_two()[:2]]
    for name, way in ways.items():
        for mine, theirs in zip(way(), expected, strict=False):
            if not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-7):
                raise SystemExit(f"{cell.name}: {name} differs")
    others = OtherProcesses()
    once = sum(timed(way, 1) for way in ways.values())
    turns = max(5, min(2000, int(seconds / once)))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            times[name].append(timed(way, 1))
    row: dict[str, Any] = {name: 1e6 * statistics.median(taken) for name, taken in times.items()}
    for kind in ("native", "step"):
        row[f"{kind}_ratio"] = row[f"{kind}_one"] / row[f"{kind}_two"]
    return {"cell": cell.name, **row, "cores_busy_elsewhere": others.cores()}


if __name__ == "__main__":
    main()
