"""timm's interface to a classifier: how features and logits come out of it, and what timm reads off a model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_TIMM = ("reset_classifier", "get_classifier", "forward_features", "forward_head")


class OfBackbone:
    """An attribute that is the backbone's; there is none where the backbone has none."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, model: Any, owner: type) -> Any:
        return self if model is None else getattr(model.backbone, self.name)


class GroupMatcher:
    """A backbone's ``group_matcher`` for the CrowdModel around it: layers of timm's ``layer_decay`` by parameter name.

    What is not the backbone's, and what its own matcher does not know (the classifier), comes last: rate times 1.

    Args:
        matcher: regular expressions by the name of a group, or a function, as timm takes them.
    """

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        specs: list[tuple[re.Pattern[str], int, Any]] = []
        for number, spec in enumerate(matcher.values() if isinstance(matcher, dict) else ()):
            pairs = spec if isinstance(spec, (tuple, list)) else [] if spec is None else [(spec, None)]
            specs += [(re.compile(pattern), number, suffix) for pattern, suffix in pairs]
        self.specs = specs

    def __call__(self, name: str) -> Any:
        """Ordinal, or a tuple of them, of a parameter of the CrowdModel."""
        inner = name.removeprefix("backbone.")
        if inner != name and not isinstance(self.matcher, dict):
            return self.matcher(inner)
        for pattern, number, suffix in self.specs if inner != name else ():
            found = pattern.match(inner)
            if found:
                return tuple(float(part) for part in (number, *found.groups(), *(suffix or ())) if part is not None)
        return (float("inf"),)


def is_timm(model: nn.Module) -> bool:
    """Whether the model has timm's interface to a classifier."""
    return isinstance(getattr(model, "num_classes", None), int) and all(
        callable(getattr(model, name, None)) for name in _TIMM
    )


def pre_logits(model: nn.Module, images: Tensor) -> Tensor:
    """``[B, D]``: what the classifier of a timm model gets."""
    return cast(Any, model).forward_head(cast(Any, model).forward_features(images), pre_logits=True)


def classify(classifier: Callable[[Tensor], Tensor], features: Tensor) -> Tensor:
    """Logits ``[B, C]`` of a timm model's classifier, a linear layer or the 1x1 convolution that some have."""
    if isinstance(classifier, nn.Conv2d):
        return classifier(features[:, :, None, None]).flatten(1)
    return classifier(features)


@torch.no_grad()
def has_single_head(model: nn.Module, images: Tensor, *, dropout: bool = True) -> bool:
    """Whether a timm model is its classifier, one layer, on its pre-logits features: seen on these images.

    In training too: a head with a dropout or a normalisation between the two is none, although in evaluation mode
    (a normalisation that has seen nothing yet) the logits are the same.

    Args:
        model: of timm.
        images: two are enough.
        dropout: whether a dropout between the two counts.
    """
    backbone = cast(Any, model)
    classifier = backbone.get_classifier()
    if not isinstance(classifier, (nn.Linear, nn.Conv2d)):
        return False
    with evaluating(model):  # no dropout, no batch statistics, so that neither the model nor the random state moves
        hidden = backbone.forward_features(images)
        with _Layers(model, dropout) as parts:
            features = backbone.forward_head(hidden, pre_logits=True)
            if features.dim() != 2:
                return False
            logits = classify(classifier, features)
        with _Layers(model, dropout) as whole:
            expected = backbone.forward_head(hidden)
        return parts.seen == whole.seen and same(logits, expected)


class _Layers(TorchFunctionMode):
    """Counts what is called with a tensor of the model, and dropouts."""

    def __init__(self, model: nn.Module, dropout: bool) -> None:
        super().__init__()
        self.dropout = dropout
        self.names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        self.seen: Counter[Any] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        own = tuple(self.names[id(value)] for value in given if id(value) in self.names)
        name = getattr(func, "__name__", "")
        drops = self.dropout and "dropout" in name and any(isinstance(p, float) and p > 0 for p in given)
        if drops or (own and name != "__get__"):
            self.seen[name, own] += 1
        return func(*args, **(kwargs or {}))


def head_length(model: nn.Module) -> int | None:
    """Length D of the pre-logits of a timm model, where it says so without a batch."""
    classifier = cast(Any, model).get_classifier()
    if isinstance(classifier, nn.Linear):
        return classifier.in_features
    length = getattr(model, "head_hidden_size", None)
    return length if isinstance(length, int) else None


def reset_classifier(model: nn.Module, num_classes: int) -> None:
    """Another number of classes, in place: on the device, in the dtype and mode of the model."""
    before = set(model.modules())
    like = next((p for p in reversed(list(model.parameters())) if p.is_floating_point()), None)
    cast(Any, model).reset_classifier(num_classes)
    for module in model.modules():
        if module not in before:
            if like is not None:  # older timm makes the new layers on the CPU in float32
                module.to(device=like.device, dtype=like.dtype)
            module.train(model.training)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module has the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def same(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)
