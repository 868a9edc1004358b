"""Every loss op on a GPU: right first, then against other ways to compute it, the memory's speed, and a whole step.

    python benchmarks/gpu.py [--quick] [--ops mixture] [--cells cmm] [--minutes 7] [--json F]

In this order: each op against the CPU on small cells (any difference ends the run with status 1); the bandwidth of a
copy; forward and backward of each op on the grid of `kernels.py` and larger, against the dense and the gathering
formulations, eager, and the faster of them under torch.compile as long as the minutes last; the training step of timm
models in bfloat16 with plain cross-entropy and with a CrowdLayer attached. Formulations take turns; medians count.

JSON rows: op, cell, formulation, milliseconds, ratio_to_ours, share_of_copy (bytes that the mathematics needs over the
time, in units of the copy's rate), peak_extra_bytes, skipped. "crowdnal, CUDA graph" is our step captured and replayed:
the kernels without Python, which is what share_of_copy is about. Training rows: model, plain_milliseconds,
head_milliseconds, overhead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _device import DeviceProblem, captured, copy_rate, describe, empty_cache, peak, turns
from _formulations import GRID, TINY, Cell, Formulation, Op
from kernels import OPS, OURS, difference, geometric_mean
from torch import Tensor
from torch.nn.functional import cross_entropy

import crowdnal

GRAPH = f"{OURS}, CUDA graph"
LARGE = [
    Cell("few annotators", 1 << 20, 20, 8, 5),
    Cell("ten million", 1 << 21, 10_000, 10, 5),
    Cell("thousand classes", 4096, 500, 1000, 3),
]
SMALL = [TINY, GRID[0], Cell("wide", 64, 9, 140, 4)]
COMPILED = ("labelme", "cifar10n", "medical", "cifar100")
MODELS = {"resnet50": 224, "vit_small_patch16_224": 224}

Row = dict[str, Any]


def main() -> None:
    arguments = parse()
    end = time.monotonic() + 60 * arguments.minutes
    torch.backends.cuda.matmul.allow_tf32 = False
    wrong = check(arguments)
    if wrong:
        sys.exit("differs from the CPU: " + "; ".join(wrong))
    machine = describe(arguments.device) | {"copy_gb_per_s": copy_rate(arguments.device) / 1e9}
    training = [train(name, size, arguments) for name, size in arguments.models.items()]
    measured: dict[tuple[str, str], list[Row]] = {}
    for compiling in (False, True):  # first everything without, in case the minutes do not last
        for op, cell in itertools.product(arguments.ops, arguments.cells):
            if time.monotonic() < end and (not compiling or (cell.name in COMPILED and not arguments.quick)):
                measured[op.name, cell.name] = measure(op, cell, arguments, machine["copy_gb_per_s"], compiling)
                print(f"{op.name} {cell.name}, {end - time.monotonic():.0f} s left", file=sys.stderr, flush=True)
                empty_cache(arguments.device)
    rows = [row for (op, cell) in measured for row in measured[op, cell]]
    ratios = {op.name: geometric_mean([best_ratio(cell) for cell in by_cell(rows, op.name)]) for op in arguments.ops}
    result = {"benchmark": "gpu", "quick": arguments.quick, "machine": machine, "training": training, "rows": rows}
    show(rows, training, machine, ratios)
    path = arguments.json or Path(__file__).parent / "results" / f"gpu-{slug(machine['device'])}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result | {"geometric_mean_ratio": ratios}, indent=1) + "\n")
    print(f"\nwritten to {path}")


def parse() -> argparse.Namespace:
    known = {cell.name: cell for cell in [*GRID, *LARGE, TINY]}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cell, no compilation, a small model")
    parser.add_argument("--cells", help=f"of {', '.join(known)}")
    parser.add_argument("--ops", default="", help=f"parts of the names of: {', '.join(op.name for op in OPS)}")
    parser.add_argument("--minutes", type=float, default=7, help="after which nothing more is measured")
    parser.add_argument("--memory-gb", type=float, default=30, help="skip what would allocate more in a step")
    parser.add_argument("--device", default="cuda", help="cpu: to try the script, not to measure")
    parser.add_argument("--json", type=Path, help="write here instead of results/gpu-DEVICE.json")
    arguments = parser.parse_args()
    names = arguments.cells.split(",") if arguments.cells else ["tiny"] if arguments.quick else list(known)[:-1]
    if unknown := set(names) - set(known):
        parser.error(f"unknown cells {', '.join(sorted(unknown))}")
    arguments.cells = [known[name] for name in names]
    arguments.ops = [op for op in OPS if any(part in op.name for part in arguments.ops.split(","))]
    arguments.models = {"resnet18": 64} if arguments.quick else MODELS
    if arguments.device != "cpu" and crowdnal.backend()["cuda"] != "native":
        parser.error("no native CUDA library is loaded: there would be nothing to measure")
    return arguments


def check(arguments: argparse.Namespace) -> list[str]:
    """Names of ops and cells whose outputs or gradients differ from the CPU's."""
    wrong = []
    for op in arguments.ops:
        for cell in SMALL:
            here, there = DeviceProblem(cell, op.leaves, "cpu"), DeviceProblem(cell, op.leaves, arguments.device)
            there.annotations = here.annotations.to(arguments.device)
            there.leaves = [leaf.detach().to(arguments.device).requires_grad_() for leaf in here.leaves]
            with torch.device(arguments.device):
                ours = op.ours(there)
            results = [result.cpu() for result in ours.results()]
            worst = difference(results, op.ours(here).results())
            if not worst <= 1000 * torch.finfo(torch.float32).eps:
                wrong.append(f"{op.name} {cell.name} by {worst:.1e}")
    return wrong


# Measuring


def measure(op: Op, cell: Cell, arguments: argparse.Namespace, copy: float, compiling: bool) -> list[Row]:
    device, steps, reasons = arguments.device, dict[str, Callable[[], object]](), dict[str, str]()
    try:
        problem = DeviceProblem(cell, op.leaves, device)
        with torch.device(device):
            ours = op.ours(problem)
        expected = [result.clone() for result in ours.results()]
    except torch.OutOfMemoryError:
        return [row(op, cell, OURS, None, skipped="out of memory")]
    steps[OURS] = ours
    try:
        if device != "cpu" and "sparse" not in op.name:
            steps[GRAPH] = captured(ours)
    except RuntimeError as error:
        reasons[GRAPH] = f"not captured: {str(error).splitlines()[0]}"
    for formulation in op.others:
        prepare(formulation.name, formulation, False, problem, expected, arguments, steps, reasons)
    others = [f for f in op.others if f.name in steps and f.compiled_memory is not None]
    if others and compiling:
        times = turns({f.name: steps[f.name] for f in others}, device, 3)
        fastest = min(others, key=lambda f: times[f.name])
        torch._dynamo.reset()
        prepare(f"{fastest.name}, compiled", fastest, True, problem, expected, arguments, steps, reasons)
    times = turns(steps, device, 3 if arguments.quick else 9)
    needed = op.work(problem)[0]
    rows = []
    for name, step in steps.items():
        share = needed / times[name] / copy / 1e9
        found = {"ratio_to_ours": times[name] / times[OURS], "share_of_copy": share}
        rows.append(row(op, cell, name, 1000 * times[name], **found, peak_extra_bytes=peak(step, device)))
    return [*rows, *(row(op, cell, name, None, skipped=reason) for name, reason in reasons.items())]


def row(op: Op, cell: Cell, formulation: str, milliseconds: float | None, **more: Any) -> Row:
    known = {"ratio_to_ours": None, "share_of_copy": None, "peak_extra_bytes": None, "skipped": None}
    names = {"op": op.name, "cell": cell.name, "formulation": formulation, "milliseconds": milliseconds}
    return names | known | more


def prepare(
    name: str,
    formulation: Formulation,
    compiled: bool,
    problem: DeviceProblem,
    expected: list[Tensor],
    arguments: argparse.Namespace,
    steps: dict[str, Callable[[], object]],
    reasons: dict[str, str],
) -> None:
    """Adds a formulation to the steps, or the reason why not."""
    needed = formulation.bytes(problem, compiled) / 1e9
    if needed > arguments.memory_gb:
        reasons[name] = f"would allocate about {needed:.1f} GB"
        return
    try:
        with torch.device(arguments.device):
            candidate = formulation.build(problem)
        if compiled:
            candidate.function = torch.compile(candidate.function, fullgraph=True, dynamic=False)
        worst = difference(candidate.results(), expected)
    except (ImportError, torch.OutOfMemoryError, RuntimeError) as error:
        reasons[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return
    if worst <= 1000 * torch.finfo(torch.float32).eps:
        steps[name] = candidate
    else:
        reasons[name] = f"differs by {worst:.1e} of the largest value"


def train(name: str, size: int, arguments: argparse.Namespace) -> Row:
    """A training step in bfloat16 with plain labels and with a CrowdLayer on many annotators' labels."""
    import timm

    device, cell = arguments.device, GRID[0]
    batch = 4 if arguments.quick else cell.items
    problem = DeviceProblem(Cell(cell.name, batch, cell.annotators, cell.classes, cell.per_item), lambda p: [], device)
    images = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
    target = torch.randint(cell.classes, (batch,), device=device)
    steps = {}
    for head in (False, True):
        torch.manual_seed(0)
        model: Any = timm.create_model(name, num_classes=cell.classes)
        if head:
            model = crowdnal.attach(model, crowdnal.CrowdLayer(cell.classes, cell.annotators))
        model.to(device=device, memory_format=torch.channels_last).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

        def step(model: Any = model, optimizer: Any = optimizer, head: bool = head) -> None:
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(images, problem.annotations).loss if head else cross_entropy(model(images), target)
            loss.backward()
            optimizer.step()

        steps[OURS if head else "plain"] = step
    times = turns(steps, device, 3 if arguments.quick else 15, block=0.3)
    overhead = times[OURS] / times["plain"] - 1
    milliseconds = {"plain_milliseconds": 1000 * times["plain"], "head_milliseconds": 1000 * times[OURS]}
    return {"model": name, "image": size, "batch": batch} | milliseconds | {"overhead": overhead}


# Showing


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def by_cell(rows: list[Row], op: str) -> list[list[Row]]:
    """The timed rows of an op, ours first, a list a cell."""
    cells = dict.fromkeys(row["cell"] for row in rows if row["op"] == op and row["formulation"] == OURS)
    timed = [[r for r in rows if (r["op"], r["cell"]) == (op, cell) and r["milliseconds"]] for cell in cells]
    return [cell for cell in timed if any(row["formulation"] not in (OURS, GRAPH) for row in cell)]


def best(cell: list[Row]) -> Row:
    return min((r for r in cell if r["formulation"] not in (OURS, GRAPH)), key=lambda r: r["milliseconds"])


def best_ratio(cell: list[Row]) -> float:
    return best(cell)["ratio_to_ours"]


def show(rows: list[Row], training: list[Row], machine: Row, ratios: dict[str, float]) -> None:
    for op in dict.fromkeys(row["op"] for row in rows):
        print(f"\n{op} (geometric mean of the ratios {ratios[op]:.1f})")
        for cell in by_cell(rows, op):
            other, graph = best(cell), next((r for r in cell if r["formulation"] == GRAPH), cell[0])
            print(
                f"  {cell[0]['cell']:16} {cell[0]['milliseconds']:9.3f} ms, kernels {graph['milliseconds']:9.3f} ms "
                f"({graph['share_of_copy']:.0%} of copy), {other['formulation']} {other['milliseconds']:.3f} ms: "
                f"{other['ratio_to_ours']:.1f}x"
            )
    for r in training:
        print(
            f"{r['model']}: {r['plain_milliseconds']:.2f} ms plain, {r['head_milliseconds']:.2f} ms with the head, "
            f"{r['overhead']:+.1%}"
        )
    print(
        ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in machine.items()
        )
    )


if __name__ == "__main__":
    main()
