"""What the machine is, what it can do at most, and how much of it others use meanwhile."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

import crowdnal


def timed(step: Callable[[], object], repeats: int) -> float:
    """Seconds per step."""
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats


def best_rate(work: float, step: Callable[[], object], seconds: float = 0.5) -> float:
    """The best of many: a peak, whatever else runs."""
    step()
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = max(best, work / timed(step, 1))
    return best


def copy_rate() -> float:
    """Bytes a second, read and written, of a copy that no cache of a core holds."""
    source = torch.ones(2**26)
    target = torch.empty_like(source)
    return best_rate(2 * source.nbytes, lambda: target.copy_(source))


def product_rate() -> float:
    a, b = torch.randn(2, 2048, 2048)
    out = torch.empty_like(a)
    return best_rate(2 * 2048**3, lambda: torch.mm(a, b, out=out))


def describe() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).is_file():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "backend": crowdnal.backend()["cpu"],
    }


def allocations(recorded: profile) -> Iterator[tuple[int, int, int]]:
    """(time, address, bytes: negative for a release)."""
    assert recorded.profiler and recorded.profiler.kineto_results
    waiting = list(recorded.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size


def peak_bytes(step: Callable[[], object]) -> int:
    """Most bytes alive at once of those that a step allocates, gradients included, from torch's CPU allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as recorded:
        step()
    alive: dict[int, int] = {}
    total = highest = 0
    for _, address, size in sorted(allocations(recorded), key=lambda event: event[0]):
        if size < 0:
            total -= alive.pop(address, 0)
        else:
            alive[address] = size
            total += size
            highest = max(highest, total)
    return highest


class OtherProcesses:
    """How many cores everything but this process and its children kept busy since this was made (0 off Linux)."""

    def __init__(self) -> None:
        self.start = self.seconds()

    @staticmethod
    def seconds() -> tuple[float, float]:
        """(time, processor seconds of all other processes)."""
        stat, total = Path("/proc/stat"), 0.0
        if stat.is_file():
            user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
            ticks = user + nice + system + irq + softirq + steal
            total = ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
        return time.perf_counter(), total

    def cores(self) -> float:
        now, used = self.seconds()
        return max(0.0, (used - self.start[1]) / (now - self.start[0]))


class PeakMemory:
    """Most resident memory since this was made, beyond what there was then (None where it cannot be told)."""

    def __init__(self) -> None:
        self.known = Path("/proc/self/clear_refs").exists()
        if self.known:
            Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
            self.before = self.bytes("VmRSS")

    @staticmethod
    def bytes(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

    def extra(self) -> int | None:
        return max(0, self.bytes("VmHWM") - self.before) if self.known else None
