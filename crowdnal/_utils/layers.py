"""Linear layers as objectives use them: in the dtype of their input, of a width that may be inferred late."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """In the dtype of x, whatever that of the parameters is."""
    return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))


def set_input_size(layer: nn.Linear, feature_dim: int) -> None:
    """Makes the parameters of a layer whose input size was open.

    Raises:
        ValueError: the size was another one already.
    """
    if isinstance(layer, nn.LazyLinear):
        weight = layer.weight  # its size is known where a state was loaded
        size = feature_dim if layer.has_uninitialized_params() else weight.shape[1]
        layer(torch.empty(0, size, dtype=weight.dtype, device=weight.device))  # which makes it a Linear
    if layer.in_features != feature_dim:
        raise ValueError(
            f"features have length {feature_dim} but feature_dim={layer.in_features}: give the objective the length "
            "of what it is fed, or leave feature_dim out"
        )


class MLP(nn.Module):
    """Layers with ReLU between them, the last one linear.

    Args:
        inputs: length of the input; None: set by :meth:`set_input_size`, or read off the first batch.
        hidden: units of each hidden layer.
        outputs: length of the output.
    """

    def __init__(self, inputs: int | None, hidden: list[int], outputs: int) -> None:
        super().__init__()
        widths = [*hidden, outputs]
        first = nn.LazyLinear(widths[0]) if inputs is None else nn.Linear(inputs, widths[0])
        pairs = zip(widths[:-1], widths[1:], strict=True)
        self.layers = nn.ModuleList([first, *(nn.Linear(a, b) for a, b in pairs)])

    @property
    def input_size(self) -> int | None:
        """Length of the input, None as long as it is open."""
        weight = self.input.weight
        return None if nn.parameter.is_lazy(weight) else weight.shape[1]

    @property
    def input(self) -> nn.Linear:
        """The first layer."""
        first = self.layers[0]
        assert isinstance(first, nn.Linear)
        return first

    @property
    def output(self) -> nn.Linear:
        """The last layer."""
        last = self.layers[-1]
        assert isinstance(last, nn.Linear)
        return last

    def set_input_size(self, size: int) -> None:
        """Makes the parameters that depend on the length of the input; an error if it is another one."""
        set_input_size(self.input, size)

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        """``[..., inputs] -> [..., outputs]``; with ``extra [..., E]`` (it may broadcast), of the two side by side."""
        first = self.input
        if extra is None:
            self.set_input_size(x.shape[-1])
            x = linear(first, x)
        else:
            self.set_input_size(x.shape[-1] + extra.shape[-1])
            left, right = first.weight.to(x.dtype).split([x.shape[-1], extra.shape[-1]], 1)
            x = F.linear(x, left, first.bias.to(x.dtype)) + F.linear(extra, right)  # nothing is copied side by side
        for layer in list(self.layers)[1:]:
            assert isinstance(layer, nn.Linear)
            x = linear(layer, x.relu())
        return x
