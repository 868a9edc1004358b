"""CrowdModel: a classifier plus an objective; how logits and features come out of a timm model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from crowdnal.data import Annotations
from crowdnal.objectives import Objective

_TIMM = ("reset_classifier", "get_classifier", "forward_features", "forward_head")


class CrowdOutput(NamedTuple):
    """What a :class:`CrowdModel` gives for images with annotations."""

    loss: Tensor
    logits: Tensor


def attach(
    model: nn.Module,
    objective: Objective,
    *,
    num_classes: int | None = None,
    features: Callable[[Tensor], Tensor] | None = None,
) -> CrowdModel:
    """Attach an objective to a classifier.

    A timm model (recognised by its methods; timm itself is not imported) gets a new classifier if it has
    another number of classes than the objective, in place, on the device and in the dtype of the old one. Any
    other module must return logits ``[B, C]``, or ``(logits, features)``.

    Args:
        model: the backbone with its classifier. It is trained in place and stays what it was: no hooks, no
            new keys.
        objective: e.g. ``CrowdLayer(num_classes=8, num_annotators=59)``.
        num_classes: number of outputs you expect of the model, checked against the objective; default the
            objective's.
        features: ``images -> [B, D]`` for an objective with ``needs_features``, instead of the model's
            pre-logits (the raw input, say). A module becomes part of the CrowdModel and is trained too.

    Raises:
        ValueError: before anything changes, where the objective cannot be served by this model.
    """
    return CrowdModel(model, objective, num_classes=num_classes, features=features)


class CrowdModel(nn.Module):
    """``model(images) -> logits [B, C]``; ``model(images, annotations) -> CrowdOutput(loss, logits)``.

    Attributes:
        backbone: the model as it was given.
        objective: the criterion; its parameters are trained with the backbone's.
        features: the callable given to :func:`attach`, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        *,
        num_classes: int | None = None,
        features: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is {type(model).__name__} but must be a torch.nn.Module")
        if not isinstance(objective, Objective):
            raise TypeError(f"objective is {type(objective).__name__} but must be a crowdnal objective")
        if num_classes is not None and num_classes != objective.num_classes:
            raise ValueError(
                f"num_classes={num_classes} but the objective was made for {objective.num_classes} true "
                "classes: make both the same, or leave num_classes out"
            )
        self._timm = is_timm(model)
        tells = self._timm and objective.needs_features and features is None
        if tells and _has_linear_classifier(model):  # refuses another length before anything changes
            objective.set_feature_dim(cast(Any, model).get_classifier().in_features)
        if self._timm and cast(Any, model).num_classes != objective.num_classes:
            _reset_classifier(model, objective.num_classes)
        self.backbone = model
        self.objective = objective
        self.features = features
        # whether classifier(pre-logits) is the model's output: structure says so, the first batch confirms
        self._single_head = self._timm and _has_linear_classifier(model)
        self._confirmed = False
        if tells and self._single_head:  # now also of a model that had no classifier
            objective.set_feature_dim(cast(Any, model).get_classifier().in_features)

    def forward(self, images: Tensor, annotations: Annotations | Tensor | None = None) -> Tensor | CrowdOutput:
        """Logits of images (the objective's, where it predicts in a way of its own), and with annotations the loss.

        Args:
            images: whatever the backbone takes, B items first.
            annotations: of the same B items, or a dense ``[B, R]`` tensor with -1 where there is no label.
        """
        if annotations is None and not self.objective.predicts:
            return self._logits(self.backbone(images))
        logits, features = self.logits_and_features(images)
        if annotations is None:
            return self.objective.predict(logits, features)
        loss = self.objective(logits, annotations, features)
        if self.objective.predicts:
            with torch.no_grad():
                logits = self.objective.predict(logits, features)
        return CrowdOutput(loss, logits)

    def logits_and_features(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits ``[B, C]`` and, where the objective needs them, features ``[B, D]``: what it is given."""
        if not self.objective.needs_features:
            return self._logits(self.backbone(images)), None
        if self.features is not None:
            return self._logits(self.backbone(images)), self.features(images)
        if self._timm:
            return self._timm_logits_and_features(images)
        output = self.backbone(images)
        if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], Tensor):
            return self._logits(output), output[1]
        raise ValueError(
            f"{type(self.objective).__name__} needs features, which {type(self.backbone).__name__} does not "
            "give: let it return (logits, features), or use attach(model, objective, features=...)"
        )

    def _timm_logits_and_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        backbone = cast(Any, self.backbone)
        if not torch.compiler.is_compiling() and not self._confirmed:
            self._confirm(images)
        hidden = backbone.forward_features(images)
        features = backbone.forward_head(hidden, pre_logits=True)
        logits = classify(backbone.get_classifier(), features) if self._single_head else backbone.forward_head(hidden)
        return self._logits(logits), features

    @torch.no_grad()
    def _confirm(self, images: Tensor) -> None:
        """See on two images that the parts of the model, put together, are the model."""
        backbone, images = cast(Any, self.backbone), images[:2]
        # no dropout, no batch statistics, so that neither the model nor the random state moves
        with evaluating(self.backbone):
            whole = self._logits(backbone(images))
            if not _same(backbone.forward_head(backbone.forward_features(images)), whole):
                raise ValueError(
                    f"{type(backbone).__name__}.forward is not forward_head(forward_features(images)), so "
                    "its features cannot be inferred: use attach(model, objective, features=...)"
                )
        self._single_head = self._single_head and has_single_head(backbone, images)
        self._confirmed = len(images) > 0

    def _logits(self, output: Any) -> Tensor:
        is_pair = isinstance(output, tuple) and len(output) == 2 and not self._timm
        logits = output[0] if is_pair else output
        num_classes = self.objective.num_classes
        if isinstance(logits, Tensor) and logits.dim() == 2 and logits.shape[1] == num_classes:
            return logits
        got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"{type(self.backbone).__name__} returned {got} but the objective needs logits "
            f"[B, {num_classes}]: give the model {num_classes} outputs (its last layer), without a softmax"
        )


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


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)


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
def has_single_head(model: nn.Module, images: Tensor) -> bool:
    """Whether a timm model is its classifier, one layer, on its pre-logits features: seen on these images."""
    classifier = cast(Any, model).get_classifier()
    if not isinstance(classifier, (nn.Linear, nn.Conv2d)):
        return False
    with evaluating(model):  # no dropout, no batch statistics, so that neither the model nor the random state moves
        features = pre_logits(model, images)
        return features.dim() == 2 and _same(classify(classifier, features), model(images))


def _has_linear_classifier(model: nn.Module) -> bool:
    """One linear layer: not two of a distilled model, a pass-through, or a convolution before pooling."""
    return isinstance(cast(Any, model).get_classifier(), nn.Linear)


def _reset_classifier(model: nn.Module, num_classes: int) -> None:
    before = set(model.modules())
    like = next((p for p in reversed(list(model.parameters())) if p.is_floating_point()), None)
    cast(Any, model).reset_classifier(num_classes)
    for module in model.modules():
        if module not in before:
            if like is not None:  # older timm makes the new layers on the CPU in float32
                module.to(device=like.device, dtype=like.dtype)
            module.train(model.training)
