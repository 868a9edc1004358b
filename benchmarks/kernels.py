"""Every loss op, forward and backward, against the other ways to compute it, and against what the machine can do.

    python benchmarks/kernels.py [--quick] [--cells labelme,cmm] [--ops mixture] [--threads 2] [--json F] [--markdown]

The others: the dense einsum over [B, R, C] with masking and gather + bmm, each eager and under torch.compile, and
crowd-kit's own layers (eager) if it is installed. All results are compared with ours first; a formulation that differs
is not timed and the exit status is 1. One process, the same threads; blocks of all formulations are interleaved, the
median block counts. All get what they read (annotations in both orders, index tensors, dense targets) ready made.

JSON rows: op, cell, formulation, milliseconds, ratio_to_ours (its time in units of ours), share_of_peak (bytes or
operations that the mathematics needs, the larger share of copy bandwidth and fp32 matrix rate, both measured in this
run), limit_milliseconds (what nothing can be faster than: an autograd Function with the same tensors that computes
nothing, empty_milliseconds, and after it what share_of_peak counts, at those rates), times_limit (its time in units of
the limit), peak_extra_bytes (allocated beyond inputs and gradients), skipped (why there are no numbers, or null),
cores_busy_elsewhere (with other processes, while the cell was timed). Where these and our threads are more than the
cores, the OpenMP threads of all formulations wait for one another and the times mean little: the cell has a star.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _formulations import GRID, THOUSAND, TINY, Candidate, Cell, Formulation, Op, Problem
from _joint import JOINT_OPS
from _limit import empty_step
from _machine import OtherProcesses, allocations, copy_rate, describe, product_rate, timed
from _mixture import MIXTURE_OPS
from _pairs import PAIR_OPS
from _softmax import SOFTMAX_OPS
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

OURS, EMPTY = "crowdnal", "empty Function"
OPS = [*SOFTMAX_OPS, *MIXTURE_OPS, *JOINT_OPS, *PAIR_OPS]
BLOCK = 0.01  # seconds, at least, of one formulation's turn
QUICK = ("labelme", "cifar10n")
HOPELESS = 8  # an eager formulation this many times slower than the best is not compiled: that gained 4 times at most

Row = dict[str, Any]


def main() -> None:
    arguments = parse()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's output
    torch.set_num_threads(arguments.threads)
    peak = {"copy_gb_per_s": copy_rate() / 1e9, "fp32_gflop_per_s": product_rate() / 1e9}
    machine = describe() | {"dtype": arguments.dtype} | peak
    rows: list[Row] = []
    for op in arguments.ops:
        for cell in arguments.cells:
            start = time.perf_counter()
            rows += measure(op, cell, arguments, peak)
            print(f"{op.name} {cell.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        show(op, arguments.cells, rows, arguments.markdown)
    summary = {op.name: geometric_mean([r for _, _, r in best_others(op, rows)]) for op in arguments.ops}
    summary["all"] = geometric_mean([r for op in arguments.ops for _, _, r in best_others(op, rows)])
    limits = {op.name: geometric_mean(times_limit(op, rows)) for op in arguments.ops}
    limits["all"] = geometric_mean([times for op in arguments.ops for times in times_limit(op, rows)])
    star = "*" if any(contended(row) for row in rows) else ""
    print(f"\nOur times in units of the limit{star}: " + ", ".join(f"{k} {mean:.1f}" for k, mean in limits.items()))
    print(f"Geometric mean of the ratios{star}: " + ", ".join(f"{k} {mean:.1f}" for k, mean in summary.items()))
    print("\n" + ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in machine.items()))
    if star:
        print(
            "\n* Other processes competed for the cores: do not quote these. Wait until they end, use fewer --threads, "
            "or set GOMP_SPINCOUNT=0, which makes waiting threads sleep."
        )
    if arguments.json:
        result = {"benchmark": "kernels", "quick": arguments.quick, "machine": machine, "rows": rows}
        means = {"geometric_mean_ratio": summary, "geometric_mean_times_limit": limits}
        arguments.json.write_text(json.dumps(result | means, indent=1) + "\n")
    if any((row["skipped"] or "").startswith("differs") for row in rows):
        sys.exit("a formulation differs from crowdnal")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two cells, few turns, one compilation")
    parser.add_argument("--cells", help=f"of {', '.join(c.name for c in [*GRID, THOUSAND, TINY])} (the last for tests)")
    parser.add_argument("--ops", default="", help=f"parts of the names of: {', '.join(op.name for op in OPS)}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="with torch.compile")
    parser.add_argument("--memory-gb", type=float, default=4, help="skip what would allocate more in a step")
    parser.add_argument("--step-seconds", type=float, default=5, help="skip what takes longer for a step")
    parser.add_argument("--json", type=Path, help="write machine and rows here")
    parser.add_argument("--markdown", action="store_true", help="print the tables as markdown")
    arguments = parser.parse_args()
    names = [c.name for c in GRID]
    if arguments.cells or arguments.quick:
        names = arguments.cells.split(",") if arguments.cells else list(QUICK)
    known = {cell.name: cell for cell in [*GRID, THOUSAND, TINY]}
    if unknown := set(names) - set(known):
        parser.error(f"unknown cells {', '.join(sorted(unknown))}")
    arguments.cells = [known[name] for name in names]
    arguments.ops = [op for op in OPS if any(part in op.name for part in arguments.ops.split(","))]
    if not arguments.ops:
        parser.error("--ops matches no op")
    arguments.torch_dtype = getattr(torch, arguments.dtype)
    return arguments


# Measuring


def measure(op: Op, cell: Cell, arguments: argparse.Namespace, peak: dict[str, float]) -> list[Row]:
    """The rows of all formulations of an op in a cell, ours first."""
    torch._dynamo.reset()
    problem = Problem(cell, op.leaves, arguments.torch_dtype)
    ours = op.ours(problem)
    expected = [result.clone() for result in ours.results()]
    empty = empty_step(ours, problem, expected[0])
    running, reasons = {OURS: ours, EMPTY: empty}, {OURS: ""}
    once = {name: typical(step) for name, step in running.items()}

    def attempt(name: str, formulation: Formulation, compiled: bool) -> None:
        candidate, seconds, reason = prepare(formulation, compiled, problem, expected, arguments)
        reasons[name] = reason
        if seconds:
            once[name] = seconds
        if candidate and not reason:
            running[name] = candidate

    for formulation in op.others:
        attempt(formulation.name, formulation, False)
    compilable = [f for f in op.others if f.compiled_memory is not None and arguments.compile]
    fastest = min((once[f.name] for f in compilable if f.name in once), default=1.0)
    for formulation in compilable:
        name = f"{formulation.name}, compiled"
        times = once.get(formulation.name, 0.0) / fastest
        if arguments.quick and (cell is not arguments.cells[0] or op is not arguments.ops[0] or times != 1):
            reasons[name] = "--quick compiles the fastest other in the first cell of the first op"
        elif times > HOPELESS:
            reasons[name] = f"eager, it takes {times:.0f} times as long as the fastest"
        else:
            attempt(name, formulation, True)
    rounds, seconds = (5, 0.1) if arguments.quick else (15, 1.0)
    others = OtherProcesses()
    milliseconds = interleaved(running, once, rounds, seconds)
    busy = others.cores()
    bytes_needed, operations = op.work(problem)
    floor = 1e-6 * max(bytes_needed / peak["copy_gb_per_s"], operations / peak["fp32_gflop_per_s"])
    limit = milliseconds[EMPTY] + floor
    return [
        {
            "op": op.name,
            "cell": cell.name,
            "formulation": name,
            "milliseconds": milliseconds.get(name),
            "ratio_to_ours": milliseconds[name] / milliseconds[OURS] if name in running else None,
            "share_of_peak": floor / milliseconds[name] if name in running else None,
            "empty_milliseconds": milliseconds[EMPTY],
            "limit_milliseconds": limit,
            "times_limit": milliseconds[name] / limit if name in running else None,
            "peak_extra_bytes": peak_extra_bytes(running[name]) if name in running else None,
            "skipped": reason or None,
            "cores_busy_elsewhere": busy,
        }
        for name, reason in reasons.items()
    ]


def prepare(
    formulation: Formulation, compiled: bool, problem: Problem, expected: list[Tensor], arguments: argparse.Namespace
) -> tuple[Candidate | None, float | None, str]:
    """(what to run, about how many seconds a step takes, why not to time it or "")."""
    needed = formulation.bytes(problem, compiled) / 1e9
    if needed > arguments.memory_gb:
        return None, None, f"would allocate about {needed:.1f} GB"
    try:
        candidate = formulation.build(problem)
    except ImportError as error:
        return None, None, f"cannot be imported: {error}"
    if compiled:
        candidate.function = torch.compile(candidate.function, fullgraph=True, dynamic=False)
    start = time.perf_counter()
    try:
        results = candidate.results()
    except Exception as error:  # no compiler, say
        if not compiled:
            raise
        return None, None, f"torch.compile failed: {str(error).strip().splitlines()[0]}"
    first = time.perf_counter() - start
    worst = difference(results, expected)
    if not worst <= 1000 * torch.finfo(problem.dtype).eps:
        return None, None, f"differs by {worst:.1e} of the largest value"
    seconds = typical(candidate) if compiled or first < 1 else first
    return candidate, seconds, f"a step takes {seconds:.1f} s" if seconds > arguments.step_seconds else ""


def difference(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest deviation of an output or gradient, in units of its largest value; NaN if there is one."""
    relative = [(a - b).abs().max() / b.abs().max() for a, b in zip(results, expected, strict=True)]
    return float(torch.stack(relative).max())


def typical(step: Callable[[], object]) -> float:
    """About how many seconds a step takes, not counting the first: one step if it is a long one."""
    once = timed(step, 1)
    return once if once > BLOCK else min(timed(step, 1) for _ in range(3))


def interleaved(running: dict[str, Candidate], once: dict[str, float], rounds: int, seconds: float) -> dict[str, float]:
    """Median milliseconds per step. Blocks are interleaved, so that a slow moment of the machine hits all alike.

    Who needs more than `seconds` for its `rounds` gets fewer of them (3 at least), spread over the whole time.
    """
    plan: dict[str, tuple[int, int]] = {}
    blocks: dict[str, list[float]] = {}
    for name in running:
        repeats = max(1, round(BLOCK / once[name]))
        plan[name] = repeats, min(rounds, max(3, int(seconds / (once[name] * repeats))))
        blocks[name] = []
    gc.collect()
    gc.disable()
    for turn in range(rounds):
        for name, (repeats, wanted) in plan.items():
            if (turn + 1) * wanted // rounds > turn * wanted // rounds:
                blocks[name].append(timed(running[name], repeats))
    gc.enable()
    return {name: 1000 * statistics.median(times) for name, times in blocks.items()}


def peak_extra_bytes(step: Candidate) -> int:
    """Most bytes alive at once during a step, the leaves' gradients aside.

    From the allocation events of torch's CPU allocator; what a kernel takes from malloc itself is not seen.
    """
    for leaf in step.leaves:
        leaf.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as recorded:
        step()
    events = sorted(allocations(recorded), key=lambda event: event[0])
    found = [leaf.grad._values() if leaf.grad.is_sparse else leaf.grad for leaf in step.leaves if leaf.grad is not None]
    gradients = {grad.untyped_storage().data_ptr() for grad in found}
    last = {address: i for i, (_, address, size) in enumerate(events) if size > 0}
    alive: dict[int, int] = {}
    total = highest = 0
    for i, (_, address, size) in enumerate(events):
        if size < 0:
            total -= alive.pop(address, 0)
        elif not (address in gradients and last[address] == i):
            alive[address] = size
            total += size
            highest = max(highest, total)
    return highest


# Showing


def best_others(op: Op, rows: list[Row]) -> list[tuple[Row, Row, float]]:
    """(our row, the fastest other row, ratio) of each cell."""
    found = []
    for ours in (row for row in rows if row["op"] == op.name and row["formulation"] == OURS):
        same = [r for r in rows if (r["op"], r["cell"]) == (op.name, ours["cell"]) and r["milliseconds"]]
        others = [row for row in same if row is not ours]
        if others:
            best = min(others, key=lambda row: row["milliseconds"])
            found.append((ours, best, best["ratio_to_ours"]))
    return found


def times_limit(op: Op, rows: list[Row]) -> list[float]:
    """Our time in units of the limit, of each cell."""
    return [row["times_limit"] for row in rows if (row["op"], row["formulation"]) == (op.name, OURS)]


def contended(row: Row) -> bool:
    return torch.get_num_threads() + row["cores_busy_elsewhere"] > (os.cpu_count() or 1) + 0.2


def geometric_mean(values: list[float]) -> float:
    return statistics.geometric_mean(values) if values else float("nan")


def show(op: Op, cells: Sequence[Cell], rows: list[Row], markdown: bool) -> None:
    sizes = {c.name: f"{c.items}, {c.annotators}, {c.classes}, {c.per_item:g}" for c in cells}
    head = "cell|B, R, C, per item|ours ms|best other ms|which|ratio|of the limit|of peak|MB|other's MB"
    table = [head.split("|")]
    for ours, best, ratio in best_others(op, rows):
        megabytes = [f"{row['peak_extra_bytes'] / 1e6:.3g}" for row in (ours, best)]
        times = [f"{row['milliseconds']:.3g}" for row in (ours, best)]
        shares = [f"{ratio:.1f}", f"{ours['times_limit']:.1f}x", f"{ours['share_of_peak']:.0%}"]
        star = "*" if contended(ours) else ""
        table.append([ours["cell"] + star, sizes[ours["cell"]], *times, best["formulation"], *shares, *megabytes])
    print(f"\n{'### ' if markdown else ''}{op.name}\n")
    if markdown:
        table.insert(1, ["---", "---", "--:", "--:", "---", "--:", "--:", "--:", "--:", "--:"])
        print("\n".join(f"| {' | '.join(line)} |" for line in table))
    else:
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for line in table:
            print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    left_out: dict[str, list[str]] = {}
    for row in rows:
        if row["op"] == op.name and row["skipped"]:
            left_out.setdefault(row["skipped"], []).append(f"{row['formulation']} ({row['cell']})")
    print("\nNot measured:\n" if left_out else "")
    for reason, where in left_out.items():
        print(f"- {', '.join(where)}: {reason}", flush=True)


if __name__ == "__main__":
    main()
