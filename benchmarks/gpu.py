"""Every op on a GPU: right first, then against other ways to compute it, the memory's speed, and a whole step.

    python benchmarks/gpu.py [--smoke | --quick] [--ops mixture] [--cells cmm] [--minutes 7] [--json F]

In this order: each op against the CPU on small cells, in every dtype (any difference ends the run with status 1, and
what differed first is named; behind an error from which a device does not recover nothing more is checked); the
rates of a copy and of a float32 product; the training step of timm models in bfloat16 with plain cross-entropy and with
a CrowdLayer attached; forward and backward of each op on the grid of `kernels.py` and larger, against the dense and the
gathering formulations, eager; then the faster of them under torch.compile. Interleaved; medians count. What
would not end within the minutes is not begun, what does not is broken off, and the file is written after every part
and however the run ends: `at` says what was under way, `first_failure` what went wrong first. --smoke is the checks
and then one small cell of each op, in under two minutes.

JSON rows: op, cell, formulation, milliseconds, ratio_to_ours, share_of_copy (bytes that the mathematics needs over the
time, in units of the copy's rate), memory_bound (whether the bytes take longer than the operations), peak_extra_bytes,
skipped. "crowdnal, CUDA graph" is our step captured and replayed: the kernels without Python, which is what
share_of_copy is about; "crowdnal, two ops" the cross-entropy where its gradients come with the loss, had they not (and
as a graph). Training rows: model, plain_milliseconds, head_milliseconds, overhead. Targets: _targets.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _device import (
    Clock,
    DeviceProblem,
    OutOfTime,
    captured,
    copy_rate,
    describe,
    empty_cache,
    name_of,
    peak,
    product_rate,
    synchronize,
    turns,
)
from _formulations import GRID, TINY, Cell, Formulation, Op
from _primitives import PRIMITIVE_OPS
from _targets import GRAPH, TWO, Row, judge, ratios_of, show
from _timm import train_both
from kernels import OPS as LOSSES
from kernels import OURS, difference
from torch import Tensor

import crowdnal
from crowdnal.functional._autograd._function import index_of
from crowdnal.functional._autograd.softmax_link import softmax_loss

OPS = [*LOSSES, *PRIMITIVE_OPS]
LARGE = [
    Cell("few annotators", 1 << 20, 20, 8, 5),
    Cell("ten million", 1 << 21, 10_000, 10, 5),
    Cell("thousand classes", 4096, 500, 1000, 3),
]
SMALL = [TINY, GRID[0], Cell("wide", 64, 9, 140, 4)]
COMPILED = ("labelme", "cifar10n", "medical", "cifar100")
MODELS = {"resnet50": 224, "vit_small_patch16_224": 224}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAILURES = (ImportError, RuntimeError)  # of these: out of memory, no compiler, an error of CUDA
# About the seconds that a part may take on a slow day: less left, and it is not begun.
TRAINING, EAGER, COMPILING = 45, 12, 30


def main() -> None:
    arguments = parse()
    clock = Clock(60 * arguments.minutes)
    torch.backends.cuda.matmul.allow_tf32 = False
    path = arguments.json or Path(__file__).parent / "results" / f"gpu-{slug(name_of(arguments.device))}.json"
    result: Row = {"benchmark": "gpu", "quick": arguments.quick, "minutes": arguments.minutes, "unfinished": True}
    result |= {"at": "the beginning", "first_failure": None}
    try:
        for _ in parts(result, arguments, clock):
            write(path, result)
        result |= {"unfinished": False, "at": None}
    except OutOfTime:
        print("out of time: what was under way is not in the results", file=sys.stderr)
    except Exception as error:
        result["first_failure"] = result["first_failure"] or f"{result['at']}: {first_line(error)}"
        raise
    finally:
        clock.stop()
        write(path, result)
    wrong = [f"{told(c)} {c['wrong']}" for c in result.get("checks", []) if c["wrong"]]
    if wrong:
        sys.exit(f"differs from the CPU, {told(first_wrong(result))} first: " + "; ".join(wrong))
    show(result)
    if result["first_failure"]:
        sys.exit(f"failed first: {result['first_failure']}")
    print(f"\nwritten to {path}")


def parts(result: Row, arguments: argparse.Namespace, clock: Clock) -> Iterator[None]:
    """Fills the result, and stops after every part of it."""
    result["checks"] = []
    for op, cell, dtype in itertools.product(arguments.ops, SMALL, DTYPES):
        result["at"] = f"check of {op.name} {cell.name} {dtype}"
        found = check(op, cell, dtype, arguments.device)
        result["checks"].append(found)
        if found["wrong"] and result["first_failure"] is None:
            result["first_failure"] = f"{told(found)}: {found['wrong']}"
            print(f"the first to fail: {result['first_failure']}", file=sys.stderr, flush=True)
        if found["wrong"] and (lost := broken(arguments.device)):
            result["first_failure"] += f" (the device is lost, nothing more is checked: {lost})"
            break
    yield
    if result["first_failure"]:
        return
    print(f"{len(result['checks'])} checks against the CPU: all right", file=sys.stderr, flush=True)
    result["at"] = "rates of the device"
    rates = {
        "copy_gb_per_s": copy_rate(arguments.device) / 1e9,
        "fp32_gflop_per_s": product_rate(arguments.device) / 1e9,
    }
    result["machine"] = describe(arguments.device) | rates
    result |= {"training": [], "rows": []}
    for name, size in arguments.models.items():
        result["at"] = f"training of {name}"
        result["training"].append(train(name, size, arguments, clock))
        empty_cache(arguments.device)
        yield
    measured: dict[tuple[str, str], list[Row]] = {}
    eager = itertools.product(arguments.cells, arguments.ops, [False])
    compiling = itertools.product([c for c in arguments.cells if c.name in COMPILED], arguments.ops, [True])
    longest = 0.0
    for cell, op, compiled in [*eager, *([] if arguments.quick else compiling)]:  # first everything without
        needed = max(COMPILING, 1.5 * longest) if compiled else EAGER
        if clock.left() < (0 if arguments.quick else needed):
            late = row(op, cell, "fastest other, compiled" if compiled else OURS, None, skipped="no time was left")
            measured.setdefault((op.name, cell.name), []).append(late)
            continue
        before, result["at"] = clock.left(), f"times of {op.name} {cell.name}"
        rows = measure(op, cell, arguments, result["machine"], compiled)
        if compiled:
            longest = max(longest, before - clock.left())
        if rows[0]["milliseconds"] or not compiled:
            measured[op.name, cell.name] = rows
        result["rows"] = [row for rows in measured.values() for row in rows]
        if rows[0]["skipped"] and (lost := broken(arguments.device)):
            result["first_failure"] = f"{result['at']}: {rows[0]['skipped']} (the device is lost: {lost})"
            return
        print(f"{op.name} {cell.name}, {clock.left():.0f} s left", file=sys.stderr, flush=True)
        empty_cache(arguments.device)
        yield
    result["rows"] = [row for rows in measured.values() for row in rows]


def write(path: Path, result: Row) -> None:
    """All at once, so that what was written is whole whenever the run ends."""
    rows, training = result.get("rows", []), result.get("training", [])
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(".part")
    summary = {"geometric_mean_ratio": ratios_of(rows), "targets": judge(rows, training)}
    draft.write_text(json.dumps(result | summary, indent=1) + "\n")
    draft.replace(path)


def parse() -> argparse.Namespace:
    known = {cell.name: cell for cell in [*GRID, *LARGE, TINY]}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cell, no compilation, a small model")
    parser.add_argument("--smoke", action="store_true", help="the checks, then one small cell: within two minutes")
    parser.add_argument("--cells", help=f"of {', '.join(known)}")
    parser.add_argument("--ops", default="", help=f"parts of the names of: {', '.join(op.name for op in OPS)}")
    parser.add_argument("--minutes", type=float, help="after which nothing more is measured: 7 (--smoke: 1.8)")
    parser.add_argument("--memory-gb", type=float, default=30, help="skip what would allocate more in a step")
    parser.add_argument("--device", default="cuda", help="cpu: to try the script, not to measure")
    parser.add_argument("--json", type=Path, help="write here instead of results/gpu-DEVICE.json")
    arguments = parser.parse_args()
    arguments.minutes = arguments.minutes or (1.8 if arguments.smoke else 7)
    arguments.quick |= arguments.smoke
    names = arguments.cells.split(",") if arguments.cells else ["tiny"] if arguments.quick else list(known)[:-1]
    if unknown := set(names) - set(known):
        parser.error(f"unknown cells {', '.join(sorted(unknown))}")
    arguments.cells = [known[name] for name in names]
    arguments.ops = [op for op in OPS if any(part in op.name for part in arguments.ops.split(","))]
    arguments.models = {} if arguments.smoke else {"resnet18": 64} if arguments.quick else MODELS
    if arguments.device != "cpu" and crowdnal.backend()["cuda"] != "native":
        parser.error("no native CUDA library is loaded: there would be nothing to measure")
    return arguments


def check(op: Op, cell: Cell, dtype: torch.dtype, device: str) -> Row:
    """How far outputs and gradients are from the CPU's, and what is wrong with that, or None."""
    found: Row = {"op": op.name, "cell": cell.name, "dtype": str(dtype).removeprefix("torch."), "difference": None}
    try:
        here, there = DeviceProblem(cell, op.leaves, "cpu"), DeviceProblem(cell, op.leaves, device)
        here.leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in here.leaves]
        there.annotations = here.annotations.to(device)
        there.leaves = [leaf.detach().to(device).requires_grad_() for leaf in here.leaves]
        with torch.device(device):
            ours = op.ours(there)
        results = [result.cpu().double() for result in ours.results()]
    except RuntimeError as error:
        return found | {"wrong": first_line(error)}
    worst = difference(results, [result.double() for result in op.ours(here).results()])
    # Gradients of half precision are rounded last of all: a unit of the last place where the sums end up beside it.
    allowed = (1000 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps
    return found | {"difference": worst, "wrong": None if worst <= allowed else f"by {worst:.1e}"}


def told(found: Row) -> str:
    return f"{found['op']} {found['cell']} {found['dtype']}"


def first_wrong(result: Row) -> Row:
    return next(found for found in result["checks"] if found["wrong"])


def broken(device: str) -> str | None:
    """What a device says that does not recover from an error, such as a read out of bounds."""
    try:
        synchronize(device)
    except RuntimeError as error:
        return first_line(error)
    return None


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


# Measuring


def measure(op: Op, cell: Cell, arguments: argparse.Namespace, machine: Row, compiling: bool) -> list[Row]:
    """The rows of a cell, ours first."""
    try:
        return measure_all(op, cell, arguments, machine, compiling)
    except RuntimeError as error:
        return [row(op, cell, OURS, None, skipped=first_line(error))]


def measure_all(op: Op, cell: Cell, arguments: argparse.Namespace, machine: Row, compiling: bool) -> list[Row]:
    device, steps, reasons = arguments.device, dict[str, Callable[[], object]](), dict[str, str]()
    problem = DeviceProblem(cell, op.leaves, device)
    with torch.device(device):
        ours = op.ours(problem)
    expected = [result.clone() for result in ours.results()]
    steps[OURS] = ours
    nothing, index = (None,) * 3, index_of(problem.annotations)
    if op is LOSSES[0] and softmax_loss._is_of_use((*problem.leaves, *nothing, *index)):
        steps[TWO] = two_ops(ours)
    for name in list(steps) if device != "cpu" and "sparse" not in op.name else ():
        graph = name + GRAPH.removeprefix(OURS)
        try:
            steps[graph] = captured(steps[name])
        except RuntimeError as error:
            reasons[graph] = f"not captured: {first_line(error)}"
    for formulation in op.others:
        prepare(formulation.name, formulation, False, problem, expected, arguments, steps, reasons)
    others = [f for f in op.others if f.name in steps and f.compiled_memory is not None]
    if others and compiling:
        times = turns({f.name: steps[f.name] for f in others}, device, 3)
        fastest = min(others, key=lambda f: times[f.name])
        torch._dynamo.reset()
        prepare(f"{fastest.name}, compiled", fastest, True, problem, expected, arguments, steps, reasons)
    times = turns(steps, device, 3 if arguments.quick else 9)
    needed, operations = op.work(problem)
    memory_bound = needed / machine["copy_gb_per_s"] > operations / machine["fp32_gflop_per_s"]
    rows = []
    for name, step in steps.items():
        share = needed / times[name] / machine["copy_gb_per_s"] / 1e9
        found = {"ratio_to_ours": times[name] / times[OURS], "share_of_copy": share, "memory_bound": memory_bound}
        rows.append(row(op, cell, name, 1000 * times[name], **found, peak_extra_bytes=peak(step, device)))
    return [*rows, *(row(op, cell, name, None, skipped=reason) for name, reason in reasons.items())]


def two_ops(step: Callable[[], object]) -> Callable[[], object]:
    """The step of the cross-entropy with a forward op and a backward op."""

    def run() -> object:
        with mock.patch.object(softmax_loss, "_is_of_use", lambda _: False):
            return step()

    return run


def row(op: Op, cell: Cell, formulation: str, milliseconds: float | None, **more: Any) -> Row:
    known = {"ratio_to_ours": None, "share_of_copy": None, "memory_bound": None}
    names = {"op": op.name, "cell": cell.name, "formulation": formulation, "milliseconds": milliseconds}
    return names | known | {"peak_extra_bytes": None, "skipped": None} | more


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
    failures = (Exception,) if compiled else FAILURES  # a compiler may fail in any way
    try:
        with torch.device(arguments.device):
            candidate = formulation.build(problem)
        if compiled:
            candidate.function = torch.compile(candidate.function, fullgraph=True, dynamic=False)
        worst = difference(candidate.results(), expected)
    except failures as error:
        reasons[name] = first_line(error)
        return
    if worst <= 1000 * torch.finfo(torch.float32).eps:
        steps[name] = candidate
    else:
        reasons[name] = f"differs by {worst:.1e} of the largest value"


def train(name: str, size: int, arguments: argparse.Namespace, clock: Clock) -> Row:
    found = {"model": name, "image": size, "plain_milliseconds": None, "head_milliseconds": None, "overhead": None}
    if clock.left() < (0 if arguments.quick else TRAINING):
        return found | {"skipped": "no time was left"}
    try:
        return found | train_both(name, size, arguments)
    except FAILURES as error:
        return found | {"skipped": first_line(error)}


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    main()
