"""CCC's step beside a plain step of CrowdLayer, on one model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import timm
import torch
from _machine import OtherProcesses, describe, peak_bytes
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

import crowdnal
from crowdnal.ccc.meta_gradient import correction
from crowdnal.ccc.step import Corrector, confusion_of, plain_step

CLASSES, ANNOTATORS, PER_ITEM, GROUPS, RATE, LR = 10, 250, 3, 30, 0.5, 0.01
TARGETS = {"exact": 3.9, "finite_difference": 3.2, "head": 1.7}
BUDGET = 150.0  # seconds of timed turns, at most


def run(quick: bool) -> dict[str, Any]:
    """All forms."""
    network, items, pixels, turns = ("test_resnet", 8, 32, 2) if quick else ("resnet18", 32, 64, 9)
    forms = make(network, items, pixels)
    for step in forms.values():
        step()
    others = OtherProcesses()
    times = in_turns(forms, turns)
    busy = others.cores()
    plain = times.pop("plain")
    rows = []
    for form, turns_of_form in times.items():
        # the median of ratios to the plain step of the same turn: what slows the machine for a while slows both
        pairs = list(zip(turns_of_form, plain, strict=True))
        ratio, cpu_ratio = (statistics.median(mine[i] / base[i] for mine, base in pairs) for i in range(2))
        rows.append(
            {
                "form": form, "plain_steps": ratio, "plain_steps_processor_time": cpu_ratio,
                "seconds": statistics.median(wall for wall, _ in turns_of_form),
                "peak_bytes": peak_bytes(forms[form]), "target": TARGETS.get(form), "cores_busy_elsewhere": busy,
            }
        )  # fmt: skip
        show(rows[-1])
    plain_row = {"seconds": statistics.median(wall for wall, _ in plain), "peak_bytes": peak_bytes(forms["plain"])}
    print(f"plain step {plain_row['seconds']:.3f} s, peak {plain_row['peak_bytes'] / 1e6:.0f} MB")
    setting = {"model": network, "items": items, "pixels": pixels, "turns": len(plain), "optimizer": "SGD momentum"}
    return {
        "benchmark": "ccc",
        "quick": quick,
        "machine": describe(),
        "setting": setting,
        "plain": plain_row,
        "rows": rows,
    }


def show(row: dict[str, Any]) -> None:
    target = "" if row["target"] is None else f" (target {row['target']})"
    print(
        f"{row['form']:32} {row['plain_steps']:5.2f} plain steps{target}, "
        f"{row['plain_steps_processor_time']:.2f} by processor time, peak {row['peak_bytes'] / 1e6:.0f} MB, "
        f"{row['cores_busy_elsewhere']:.1f} cores busy elsewhere",
        flush=True,
    )


def in_turns(forms: dict[str, Callable[[], object]], turns: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds, by the clock and of the processor, of every turn of every form; fewer turns where time runs out."""
    times: dict[str, list[tuple[float, float]]] = {form: [] for form in forms}
    end = time.perf_counter() + BUDGET
    for turn in range(turns):
        if turn >= 2 and time.perf_counter() > end:
            break
        for form, step in forms.items():
            start, used = time.perf_counter(), time.process_time()
            step()
            times[form].append((time.perf_counter() - start, time.process_time() - used))
    return times


def make(name: str, items: int, pixels: int) -> dict[str, Callable[[], object]]:
    """A step of each form, on the same model, batch and meta batch."""
    torch.manual_seed(0)
    network = timm.create_model(name, num_classes=CLASSES)
    model = crowdnal.attach(network, crowdnal.CrowdLayer(CLASSES, ANNOTATORS)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=5e-4)
    truth = torch.randint(CLASSES, (items,))
    confusions = crowdnal.simulation.symmetric_confusions(ANNOTATORS, CLASSES, 0.6)
    annotations = crowdnal.simulation.simulate(truth, confusions, annotations_per_item=PER_ITEM).prepare()
    images, meta = torch.randn(items, 3, pixels, pixels), (torch.randn(items, 3, pixels, pixels), truth)
    groups = torch.arange(ANNOTATORS) % GROUPS

    def ours(scope: Any, how: Any) -> Callable[[], object]:
        corrector = Corrector(GROUPS, RATE, scope, how)
        return lambda: corrector.step(model, images, annotations, optimizer, None, meta, groups)

    def theirs(shared: bool) -> Callable[[], object]:
        return lambda: unrolled_step(model, images, annotations, optimizer, meta, groups, shared)

    return {
        "plain": lambda: plain_step(model, images, annotations, optimizer, None),
        "exact": ours("all", "exact"),
        "finite_difference": ours("all", "finite_difference"),
        "head": ours("head", "exact"),
        "create_graph": theirs(shared=False),
        "create_graph, one forward pass": theirs(shared=True),
    }


def unrolled_step(
    model: Any,
    images: Tensor,
    annotations: Any,
    optimizer: Any,
    meta: tuple[Tensor, Tensor],
    groups: Tensor,
    shared: bool,
) -> None:
    """The usual form: a graph of the virtual step's gradient, through which the meta loss is differentiated.

    Args:
        shared: the actual step uses the virtual one's forward pass too, instead of one of its own.
    """
    confusion = confusion_of(model)
    v = torch.zeros(GROUPS, CLASSES, CLASSES, requires_grad=True)
    weights = {name: p for name, p in model.named_parameters() if name.startswith("backbone.")}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    logits = model(images) if shared else functional_call(model, buffers, (images,))
    p = logits.softmax(-1)
    loss = crowdnal.functional.crowd_cross_entropy(p, confusion.detach() + v[groups], annotations)
    gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    virtual = {name: w - LR * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    meta_loss = F.cross_entropy(functional_call(model, {**buffers, **virtual}, (meta[0],)), meta[1])
    gradient = torch.autograd.grad(meta_loss, v, retain_graph=shared)[0]
    del loss, gradients, virtual, meta_loss
    if not shared:
        p = model(images).softmax(-1)
    corrected = confusion + correction(gradient, confusion, RATE)[groups]
    optimizer.zero_grad(set_to_none=True)
    crowdnal.functional.crowd_cross_entropy(p, corrected, annotations).backward()
    optimizer.step()
