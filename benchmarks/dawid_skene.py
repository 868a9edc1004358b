"""Dawid-Skene by EM against crowd-kit's, on simulated annotations: the same initial values and number of iterations.

    python benchmarks/dawid_skene.py [--quick] [--annotations N] [--iterations N] [--threads N] [--json FILE]

10 annotations per item, 1,000 annotators (fewer where that were less than 50 annotations each), 5 classes. Both start
from data in memory in their own form, ours from `Annotations` without anything cached; `reading` is the time to make
them from the DataFrame that crowd-kit takes. Ours is the median of three runs; crowd-kit's, one run, uses one thread.

JSON: annotations, items, annotators, classes, iterations, machine (with cores_busy_elsewhere), crowdnal and crowd-kit
(null where it is not installed) with seconds, seconds_an_iteration and peak_extra_bytes (resident memory beyond the
data; null off Linux), reading_seconds, ratio (their seconds by ours), ratio_with_reading, largest_difference of the
posteriors.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _machine import OtherProcesses, PeakMemory, describe
from torch import Tensor

import crowdnal

CLASSES, PER_ITEM, MOST_ANNOTATORS, LEAST_EACH = 5, 10, 1000, 50


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    truth, labels = crowd(max(1, arguments.annotations // PER_ITEM))
    others = OtherProcesses()
    options = {"max_iterations": arguments.iterations, "tolerance": -1.0}
    result, ours = measure(
        lambda: crowdnal.dawid_skene(labels, confusion_prior=None, **options), arguments.iterations, 3
    )
    data, seconds = {"annotations": labels.num_annotations, "items": len(labels)}, ours["seconds"]
    data |= {"annotators": labels.num_annotators, "classes": CLASSES, "iterations": arguments.iterations}
    report: dict[str, Any] = {"benchmark": "dawid_skene", **data, "machine": describe(), "crowdnal": ours}
    report |= dict.fromkeys(("crowd-kit", "reading_seconds", "ratio", "ratio_with_reading", "largest_difference"))
    print(", ".join(f"{name} {value:,}" for name, value in data.items()))
    print(f"crowdnal: {show(ours)}; accuracy {crowdnal.metrics.accuracy(result.labels, truth):.4f}", flush=True)
    try:
        import pandas
        from crowdkit.aggregation import DawidSkene
    except ImportError as error:
        print(f"crowd-kit is not compared, it cannot be imported ({error}): pip install crowd-kit")
    else:
        warnings.simplefilter("ignore")  # deprecations inside crowd-kit
        frame = pandas.DataFrame({"task": labels.item, "worker": labels.annotator, "label": labels.label})
        sizes = {"items": len(labels), "annotators": labels.num_annotators, "classes": CLASSES}
        _, reading = measure(lambda: crowdnal.Annotations.from_long(frame, **sizes), 1, 1)
        model = DawidSkene(arguments.iterations, tol=-math.inf)
        _, theirs = measure(lambda: model.fit(frame), arguments.iterations, 1)
        posterior = torch.from_numpy(model.probas_.loc[range(len(labels)), range(CLASSES)].to_numpy().copy())
        report |= {
            "crowd-kit": theirs,
            "reading_seconds": reading["seconds"],
            "ratio": theirs["seconds"] / seconds,
            "ratio_with_reading": theirs["seconds"] / (seconds + reading["seconds"]),
            "largest_difference": float((result.posterior - posterior).abs().max()),
        }
        print(f"crowd-kit: {show(theirs)}")
        print(
            f"ratio {report['ratio']:.1f}, with {reading['seconds']:.2f} s to read the DataFrame "
            f"{report['ratio_with_reading']:.1f}; largest difference of a posterior {report['largest_difference']:.1e}"
        )
    report["machine"]["cores_busy_elsewhere"] = others.cores()
    print(", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in report["machine"].items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if report["largest_difference"] is not None and not report["largest_difference"] < 1e-6:
        sys.exit("the posteriors differ from crowd-kit's")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="200,000 annotations, 3 iterations")
    parser.add_argument("--annotations", type=int)
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the numbers here")
    arguments = parser.parse_args()
    arguments.annotations = arguments.annotations or (200_000 if arguments.quick else 10_000_000)
    arguments.iterations = arguments.iterations or (3 if arguments.quick else 10)
    return arguments


def crowd(items: int) -> tuple[Tensor, crowdnal.Annotations]:
    """(truth, annotations): annotators are right with probability 0.4 to 0.9, else any class."""
    generator = torch.Generator().manual_seed(0)
    nnz = items * PER_ITEM
    annotators = max(1, min(MOST_ANNOTATORS, nnz // LEAST_EACH))
    truth = torch.randint(CLASSES, (items,), generator=generator)
    annotator = torch.randint(annotators, (nnz,), generator=generator)
    skill = 0.4 + 0.5 * torch.rand(annotators, generator=generator)
    right = torch.rand(nnz, generator=generator) < skill[annotator]
    label = torch.where(right, truth.repeat_interleave(PER_ITEM), torch.randint(CLASSES, (nnz,), generator=generator))
    indptr = PER_ITEM * torch.arange(items + 1)
    return truth, crowdnal.Annotations(indptr, annotator, label, num_annotators=annotators, num_classes=CLASSES)


def measure(step: Callable[[], Any], iterations: int, repeats: int) -> tuple[Any, dict[str, Any]]:
    """(result, its numbers)."""
    memory, times = PeakMemory(), []
    for _ in range(repeats):
        start = time.perf_counter()
        result = step()
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    numbers = {"seconds": seconds, "seconds_an_iteration": seconds / iterations, "peak_extra_bytes": memory.extra()}
    return result, numbers


def show(numbers: dict[str, Any]) -> str:
    memory = numbers["peak_extra_bytes"]
    text = f"{numbers['seconds']:.3g} s, {numbers['seconds_an_iteration']:.3g} s per iteration"
    return text if memory is None else f"{text}, {memory / 1e6:,.0f} MB beyond the data"


if __name__ == "__main__":
    main()
