"""Passes through a model beside the one that trains it: other weights, the same random state, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

Weights = Mapping[str, Tensor]


def logits_at(model: nn.Module, weights: Weights, images: Tensor) -> Tensor:
    """Logits with these parameters replaced and all others constant; running statistics stay as they are."""
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return functional_call(model, {**state, **weights}, (images,))


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor, in float32 if its dtype is lower."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def probabilities(logits: Tensor) -> Tensor:
    """``softmax(logits)``, in at least float32."""
    return at_least_float32(logits).softmax(-1)


class RandomState:
    """The random state of the CPU and of one device, as it is now: what dropout draws can be drawn again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    def restore(self) -> None:
        """Back to it."""
        torch.set_rng_state(self.cpu)
        if self.own is not None:
            torch.get_device_module(self.device).set_rng_state(self.own, self.device)


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside, the state afterwards is that of before."""
    state = RandomState(device)
    try:
        yield
    finally:
        state.restore()
