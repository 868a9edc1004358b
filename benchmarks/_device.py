"""What `gpu.py` needs of a device: problems made on it, times, graphs, memory. "cpu" is there to try the script."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _formulations import Cell, Problem
from torch import Tensor

import crowdnal


class OutOfTime(BaseException):
    """Not an `Exception`: nobody between here and the one who counts the minutes is to take it for a failure."""


class Clock:
    """Counts down, and breaks off whatever is under way when the time is over."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        signal.signal(signal.SIGALRM, self._over)
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001), 1)  # again, where a callback swallows it

    @staticmethod
    def _over(*_: object) -> None:
        raise OutOfTime

    def left(self) -> float:
        return self.end - time.monotonic()

    def stop(self) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)


class DeviceProblem(Problem):
    """As `Problem`, made on the device; annotators of an item are distinct, a random one first."""

    def __init__(self, cell: Cell, leaves: Callable[[Problem], Sequence[Tensor]], device: str) -> None:
        self.cell, self.dtype = cell, torch.float32
        self.B, self.R, self.C = cell.items, cell.annotators, cell.classes
        self.nnz = round(cell.items * cell.per_item)
        self.generator = torch.Generator(device).manual_seed(0)
        with torch.device(device):
            counts = torch.full((self.B,), self.nnz // self.B)
            counts[: self.nnz % self.B] += 1
            indptr = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
            item = torch.repeat_interleave(torch.arange(self.B), counts)
            place = torch.arange(self.nnz) - indptr[item]
            first = torch.randint(self.R, (self.B,), generator=self.generator)
            annotator = (first[item] + place * max(1, self.R // (self.nnz // self.B + 1))) % self.R
            label = torch.randint(self.C, (self.nnz,), generator=self.generator)
            self.annotations = crowdnal.Annotations(
                indptr, annotator, label, num_annotators=self.R, num_classes=self.C
            ).prepare()
            self.active = annotator.unique().numel()
            self.leaves = [leaf.requires_grad_() for leaf in leaves(self)]


def seconds(step: Callable[[], object], device: str, repeats: int) -> float:
    """Seconds per step on the device, or in Python where that is the slower."""
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - start) / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000 / repeats


def turns(steps: dict[str, Callable[[], object]], device: str, rounds: int, block: float = 0.02) -> dict[str, float]:
    """Median seconds per step; blocks of all are interleaved."""
    repeats, times = {}, {name: list[float]() for name in steps}
    for name, step in steps.items():
        step()
        repeats[name] = max(1, min(200, round(block / seconds(step, device, 1))))
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(seconds(step, device, repeats[name]))
    return {name: statistics.median(blocks) for name, blocks in times.items()}


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """The step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def peak(step: Callable[[], object], device: str) -> int | None:
    """Most bytes allocated during a step beyond those before it, gradients included."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


def copy_rate(device: str) -> float:
    source = torch.ones(1 << (22 if device == "cpu" else 28), device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds(lambda: target.copy_(source), device, 5) for _ in range(5))


def product_rate(device: str) -> float:
    """Operations a second of a float32 product without tensor cores, which our kernels do not use either."""
    size = 256 if device == "cpu" else 8192
    a, b = torch.randn(2, size, size, device=device)
    out = torch.empty_like(a)
    return 2 * size**3 / min(seconds(lambda: torch.mm(a, b, out=out), device, 3) for _ in range(3))


def empty_cache(device: str) -> None:
    if device != "cpu":
        torch.cuda.empty_cache()


def synchronize(device: str) -> None:
    """Waits for the device; raises what went wrong on it."""
    if device != "cpu":
        torch.cuda.synchronize()


def name_of(device: str) -> str:
    return "cpu" if device == "cpu" else torch.cuda.get_device_name()


def describe(device: str) -> dict[str, Any]:
    return {
        "device": name_of(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "backend": crowdnal.backend(),
    }
