"""Gradients made with the loss, against the two ops (forward, then backward) that this replaces.

    python benchmarks/one_pass.py [--quick] [--losses softmax,mixture-none] [--cells labelme,medical] [--threads 2]
                                  [--json F]

Per loss and cell, in one process, interleaved, medians in microseconds: the native calls alone (`native`: one against
two), and a step (`step`: the loss and its backward through autograd). Ratio: the median of one pass as a share of the
two ops, turn by turn.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _formulations import Cell, Problem, read_arguments
from _machine import OtherProcesses, describe, timed
from _mixture import mixture_leaves
from _softmax import leaves
from torch import Tensor

from crowdnal import reference
from crowdnal.ops import OPS

SECONDS = 1.0  # of a cell
COLUMNS = "native_two native_one native_ratio step_two step_one step_ratio".split()


@dataclass(frozen=True)
class Loss:
    """Ops `link`, `link`_backward and `link`_step; `optional` arguments between the leaves and the index are None."""

    name: str
    link: str
    leaves: Callable[[Problem], Sequence[Tensor]]
    optional: int
    options: tuple[Any, ...]
    needs: tuple[bool, ...]


KINDS = {"softmax": reference.SOFTMAX, "softplus": reference.SOFTPLUS, "none": reference.NONE}
LOSSES = [Loss("softmax", "softmax_link", leaves, 3, (True,), (True, True, False, False))] + [
    Loss(f"{link}-{kind}", f"{link}_link", mixture_leaves, 1, (number, True), (True, True))
    for link in ("mixture", "joint")
    for kind, number in KINDS.items()
]


def main() -> None:
    arguments, wanted, cells = read_arguments(__doc__, "losses", [loss.name for loss in LOSSES])
    rows = []
    print("{:17} {:9} {:>9} {:>9} {:>6} {:>10} {:>10} {:>6}   us".format(
        "loss", "cell", "two ops", "one", "ratio", "step, two", "step, one", "ratio"
    ))  # fmt: skip
    for loss in (loss for loss in LOSSES if loss.name in wanted):
        for cell in cells:
            row = measure(loss, cell, 0.05 if arguments.quick else SECONDS)
            rows.append(row)
            print("{:17} {:9} {:9.1f} {:9.1f} {:6.2f} {:10.1f} {:10.1f} {:6.2f}".format(
                loss.name, cell.name, *(row[key] for key in COLUMNS)
            ), flush=True)  # fmt: skip
    if arguments.json:
        result = {"benchmark": "one_pass", "quick": arguments.quick, "machine": describe(), "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(loss: Loss, cell: Cell, seconds: float) -> dict[str, Any]:
    """Medians of a cell, in microseconds."""
    p = Problem(cell, loss.leaves, torch.float32)
    a = p.annotations
    rows, confusion = (leaf.detach().requires_grad_() for leaf in p.leaves)
    rest = (*(None,) * loss.optional, a.indptr, a.item, a.annotator, a.order, None, a.label)
    inputs = (rows.detach(), confusion.detach(), *rest)
    link, backward, step = (OPS[loss.link + end] for end in ("", "_backward", "_step"))
    prior = (None,) * (step.num_tensors - link.num_tensors)
    one = torch.ones(())

    def native_two() -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            _, _, *kept = link.overload(*inputs, *loss.options)
            return backward.overload(one, None, *inputs, *kept, *loss.options, *loss.needs)

    def native_one() -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return step.overload(*inputs, *prior, *loss.options, *loss.needs)[2:]

    def stepped(out: Callable[[], Tensor]) -> Callable[[], list[Tensor]]:
        def run() -> list[Tensor]:
            rows.grad = confusion.grad = None  # before the forward, as optimizers' loops do
            out().backward()
            return [rows.grad, confusion.grad]  # type: ignore[list-item]

        return run

    ways: dict[str, Callable[[], Any]] = {
        "native_two": native_two,
        "native_one": native_one,
        "step_two": stepped(lambda: link(rows, confusion, *rest, *loss.options)[0]),
        "step_one": stepped(lambda: step(rows, confusion, *rest, *prior, *loss.options, *loss.needs)[0]),
    }
    expected = [gradient.clone() for gradient in native_two()[:2]]
    for name, way in ways.items():
        for mine, theirs in zip(way(), expected, strict=False):
            if not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6):
                raise SystemExit(f"{loss.name}, {cell.name}: {name} differs")
    others = OtherProcesses()
    once = sum(timed(way, 1) for way in ways.values())
    turns = max(5, min(2000, int(seconds / once)))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            rows.grad = confusion.grad = None  # its memory is there for the next
            times[name].append(timed(way, 1))
    row: dict[str, Any] = {name: 1e6 * statistics.median(taken) for name, taken in times.items()}
    for kind in ("native", "step"):
        turn_by_turn = zip(times[f"{kind}_one"], times[f"{kind}_two"], strict=True)
        row[f"{kind}_ratio"] = statistics.median(mine / theirs for mine, theirs in turn_by_turn)
    return {"loss": loss.name, "cell": cell.name, **row, "cores_busy_elsewhere": others.cores()}


if __name__ == "__main__":
    main()
