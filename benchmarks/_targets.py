"""What `gpu.py` is to show: the targets, which cells meet them, and the tables."""

from __future__ import annotations

from typing import Any

from kernels import OURS, geometric_mean

GRAPH = f"{OURS}, CUDA graph"
TWO = f"{OURS}, two ops"
SHARE, RATIO, OVERHEAD = 0.6, 3.0, 0.01
LONG = 0.1  # milliseconds, from which on the share of the copy's rate counts
HEADED = "resnet50"  # the model whose step must not be longer than by OVERHEAD
TARGETS = {
    "share_of_copy": f"memory-bound kernels of over {1000 * LONG:g} us: at least {SHARE:.0%} of the copy's rate",
    "ratio": f"at least {RATIO:g} times as fast as the best other formulation",
    "overhead": f"the head makes a step of {HEADED} at most {OVERHEAD:.0%} longer",
}

Row = dict[str, Any]


def by_cell(rows: list[Row], op: str) -> list[list[Row]]:
    """The timed rows of an op, ours first, a list per cell."""
    cells = dict.fromkeys(row["cell"] for row in rows if row["op"] == op and row["formulation"] == OURS)
    timed = [[r for r in rows if (r["op"], r["cell"]) == (op, cell) and r["milliseconds"]] for cell in cells]
    return [cell for cell in timed if cell]


def best(cell: list[Row]) -> Row | None:
    """The fastest row that is not ours."""
    others = [row for row in cell if row["formulation"] not in (OURS, GRAPH, TWO, f"{TWO}, CUDA graph")]
    return min(others, key=lambda row: row["milliseconds"], default=None)


def kernels_of(cell: list[Row]) -> Row:
    """Ours without Python, where that was measured."""
    return next((row for row in cell if row["formulation"] == GRAPH), cell[0])


def ops_of(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["op"] for row in rows))


def ratios_of(rows: list[Row]) -> dict[str, float | None]:
    """Geometric mean over the cells of an op where there is something to compare with; None without any."""
    found = {op: [other["ratio_to_ours"] for cell in by_cell(rows, op) if (other := best(cell))] for op in ops_of(rows)}
    return {op: geometric_mean(ratios) if ratios else None for op, ratios in found.items()}


def judge(rows: list[Row], training: list[Row]) -> dict[str, dict[str, Any]]:
    """For each target what it says, and the cells that meet it and that miss it with their values."""
    found: dict[str, dict[str, Any]] = {name: {"says": says, "met": {}, "missed": {}} for name, says in TARGETS.items()}

    def enter(target: str, where: str, value: float, meets: bool) -> None:
        found[target]["met" if meets else "missed"][where] = value

    for op in ops_of(rows):
        for cell in by_cell(rows, op):
            where, kernels, other = f"{op}, {cell[0]['cell']}", kernels_of(cell), best(cell)
            if kernels["formulation"] == GRAPH and kernels["memory_bound"] and kernels["milliseconds"] > LONG:
                enter("share_of_copy", where, kernels["share_of_copy"], kernels["share_of_copy"] >= SHARE)
            if other is not None:
                enter("ratio", where, other["ratio_to_ours"], other["ratio_to_ours"] >= RATIO)
    for row in training:
        if row["model"] == HEADED and row["overhead"] is not None:
            enter("overhead", row["model"], row["overhead"], row["overhead"] <= OVERHEAD)
    return found


def show(result: Row) -> None:
    rows, training = result.get("rows", []), result.get("training", [])
    for op, mean in ratios_of(rows).items():
        print(f"\n{op}" + ("" if mean is None else f" (geometric mean of the ratios {mean:.1f})"))
        for cell in by_cell(rows, op):
            kernels, other = kernels_of(cell), best(cell)
            compared = "nothing to compare with"
            if other is not None:
                compared = f"{other['formulation']} {other['milliseconds']:.3f} ms: {other['ratio_to_ours']:.1f}x"
            print(
                f"  {cell[0]['cell']:16} {cell[0]['milliseconds']:9.3f} ms, kernels {kernels['milliseconds']:9.3f} ms "
                f"({kernels['share_of_copy']:.0%} of copy), {compared}"
            )
    for row in rows:
        if row["formulation"] == OURS and row["skipped"]:
            print(f"{row['op']} {row['cell']} was not measured: {row['skipped']}")
    for row in training:
        if row["skipped"]:
            print(f"{row['model']} was not measured: {row['skipped']}")
        else:
            print(
                f"{row['model']}: {row['plain_milliseconds']:.2f} ms plain, {row['head_milliseconds']:.2f} ms with the "
                f"head, {row['overhead']:+.1%}"
            )
    for name, target in judge(rows, training).items():
        print(f"\n{target['says']}: {len(target['met'])} meet it, {len(target['missed'])} miss it")
        for where, value in target["missed"].items():
            print(f"  missed: {where}: {value:.1f}x" if name == "ratio" else f"  missed: {where}: {value:.1%}")
    machine = result.get("machine", {})
    print("\n" + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in machine.items()))
