"""CrowdModel: a classifier plus an objective."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from crowdnal.data import Annotations, as_annotations, mark_batch
from crowdnal.objectives import Objective
from crowdnal.training._crossfit import CrossFit, out_of_fold
from crowdnal.training._fsdp import gathering, is_sharded
from crowdnal.training._timm import (
    GroupMatcher,
    OfBackbone,
    evaluating,
    has_single_head,
    head_length,
    is_timm,
    reset_classifier,
    same,
)


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
    other module must return logits ``[B, C]``, or ``(logits, features)``, or what has ``logits`` (transformers).

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

    What timm reads off a model (``pretrained_cfg``, ``group_matcher`` and the like) is the backbone's;
    ``no_weight_decay()`` adds every parameter of the objective: decay pulls annotators with few labels to what
    says nothing.
    """

    default_cfg = OfBackbone()
    get_classifier = OfBackbone()
    head_hidden_size = OfBackbone()
    num_classes = OfBackbone()
    num_features = OfBackbone()
    pretrained_cfg = OfBackbone()
    set_grad_checkpointing = OfBackbone()

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
        if isinstance(model, CrossFit):
            _check_cross_fit(objective, features)
        self._timm = is_timm(model)
        asked = self._timm and objective.needs_features and features is None
        if asked:  # refuses another length before anything changes
            _tell_length(objective, model)
        if self._timm and cast(Any, model).num_classes != objective.num_classes:
            reset_classifier(model, objective.num_classes)
        self.backbone = model
        self.objective = objective
        self.features = features
        taken: Mapping[str, inspect.Parameter] = {}
        with suppress(ValueError):  # of what was compiled elsewhere
            taken = inspect.signature(model.forward).parameters
        self._keywords = frozenset(taken)
        self._any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        # whether classifier(pre-logits) is the model's output: seen on the first batch
        self._single_head = False
        self._confirmed = False
        if asked:  # now also of a model that had no classifier
            _tell_length(objective, model)

    def forward(self, images: Tensor, annotations: Annotations | Tensor | None = None) -> Tensor | CrowdOutput:
        """Logits of images (the objective's, where it predicts in a way of its own), and with annotations the loss.

        Args:
            images: whatever the backbone takes, B items first; a mapping with the names of its arguments
                becomes keyword arguments.
            annotations: of the same B items, or a dense ``[B, R]`` tensor with -1 where there is no label. Where the
                backbone gives logits of tokens ``[B, T, C]``, an item is a token: B·T items, a sequence after another.
        """
        if annotations is None and not self.objective.predicts:
            return self._logits(self._run(images))
        if isinstance(self.backbone, CrossFit) and annotations is not None:
            return self._cross_fitted(images, annotations)
        logits, features = self.logits_and_features(images)
        shape = logits.shape
        logits = logits.flatten(0, -2)
        features = features.flatten(0, 1) if features is not None and len(shape) == 3 else features
        if annotations is None:
            return _shaped(self.objective.predict(logits, features), shape)
        loss = self.objective(logits, annotations, features)
        if self.objective.predicts:
            with torch.no_grad():
                logits = self.objective.predict(logits, features)
        return CrowdOutput(loss, _shaped(logits, shape))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As ``torch.nn.Module.compile``, in place; batches of every size but 1 (a last one, say) share one graph."""
        super().compile(*args, **kwargs)
        compiled = cast(Any, self._compiled_call_impl)

        def call(images: Any, *rest: Any, **named: Any) -> Any:
            mark_batch(images)
            return compiled(images, *rest, **named)

        self._compiled_call_impl = call

    def _run(self, images: Any, function: Callable[..., Any] | None = None) -> Any:
        function = self.backbone if function is None else function
        if isinstance(images, Mapping) and (self._any_keyword or self._keywords.issuperset(images)):
            return function(**images)
        return function(images)

    def _cross_fitted(self, images: Any, annotations: Annotations | Tensor) -> CrowdOutput:
        """The mean loss of the copies, each of the items outside its fold, and out-of-fold logits."""
        crossfit, objective = cast(CrossFit, self.backbone), self.objective
        given = as_annotations(annotations, num_annotators=objective.num_annotators, num_classes=objective.num_labels)
        scores = self._run(images, crossfit.scores)
        self._logits(scores[0])
        features = self.features(images) if objective.needs_features and self.features is not None else None
        fold, losses = crossfit.fold_of(given), []
        for k, own in enumerate(scores):
            rows = (fold != k).nonzero()[:, 0]
            there = rows.to(own.device)
            logits = own[there]
            if logits.requires_grad:  # of a mean of losses, but every copy learns as it would alone
                logits.register_hook(lambda gradient: len(scores) * gradient)
            kept = None if features is None else features[there]
            losses.append(objective(logits, given[rows.to(given.device)], kept))
        return CrowdOutput(torch.stack(losses).mean(), out_of_fold(scores.detach(), fold))

    def no_weight_decay(self) -> set[str]:
        """Names, as timm's optimizers ask for them: the backbone's own, and all parameters of the objective."""
        own = cast(Any, self.backbone).no_weight_decay() if hasattr(self.backbone, "no_weight_decay") else ()
        objective = {f"objective.{name}" for name, _ in self.objective.named_parameters()}
        return {f"backbone.{name}" for name in own} | objective

    @property
    def group_matcher(self) -> Callable[..., GroupMatcher]:
        """The backbone's, for timm's layer-wise learning rates; there is none where the backbone has none."""
        matcher = cast(Any, self.backbone).group_matcher
        return lambda coarse=False: GroupMatcher(matcher(coarse=coarse))

    def logits_and_features(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits ``[B, C]`` and, where the objective needs them, features ``[B, D]``: what it is given."""
        if not self.objective.needs_features:
            return self._logits(self._run(images)), None
        if self.features is not None:
            return self._logits(self._run(images)), self.features(images)
        if self._timm:
            return self._timm_logits_and_features(images)
        output = self._run(images)
        if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], Tensor):
            return self._logits(output), output[1]
        raise ValueError(
            f"{type(self.objective).__name__} needs features, which {type(self.backbone).__name__} does not "
            "give: let it return (logits, features), or use attach(model, objective, features=...)"
        )

    def predicted(self, images: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """As :meth:`logits_and_features`, but the logits are the objective's where it predicts in a way of its own.

        Args:
            images: as of :meth:`forward`.
            rows: ``[B]`` of these items in the training set, whose logits are then out of fold (:class:`CrossFit`).
        """
        if rows is not None and isinstance(self.backbone, CrossFit):
            logits = out_of_fold(self._run(images, self.backbone.scores), self.backbone.fold[rows])
            needed = self.objective.needs_features and self.features is not None
            return self._logits(logits), self.features(images) if needed and self.features is not None else None
        logits, features = self.logits_and_features(images)
        return self.objective.predict(logits, features), features

    def _timm_logits_and_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        backbone = gathering(self.backbone, "forward_features", "forward_head")
        if not torch.compiler.is_compiling() and not self._confirmed:
            self._confirm(images)
        hidden = backbone.forward_features(images)
        features = backbone.forward_head(hidden, pre_logits=True)
        logits = backbone.get_classifier()(features) if self._single_head else backbone.forward_head(hidden)
        return self._logits(logits), features

    @torch.no_grad()
    def _confirm(self, images: Tensor) -> None:
        """See on two images that the parts of the model, put together, are the model."""
        backbone, images = cast(Any, self.backbone), images[:2]
        # no dropout, no batch statistics, so that neither the model nor the random state moves
        with evaluating(self.backbone):
            whole = self._logits(backbone(images))
            if not same(backbone.forward_head(backbone.forward_features(images)), whole):
                raise ValueError(
                    f"{type(backbone).__name__}.forward is not forward_head(forward_features(images)), so "
                    "its features cannot be inferred: use attach(model, objective, features=...)"
                )
        # a unit of FSDP2 has whole parameters only while it is called
        linear = isinstance(backbone.get_classifier(), nn.Linear) and not is_sharded(self.backbone)
        self._single_head = linear and has_single_head(backbone, images)
        self._confirmed = len(images) > 0

    def _logits(self, output: Any) -> Tensor:
        is_pair = isinstance(output, tuple) and len(output) == 2 and not self._timm
        logits = output[0] if is_pair else output if isinstance(output, Tensor) else getattr(output, "logits", output)
        num_classes = self.objective.num_classes
        if isinstance(logits, Tensor) and logits.dim() in (2, 3) and logits.shape[-1] == num_classes:
            return logits
        got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"{type(self.backbone).__name__} returned {got} but the objective needs logits "
            f"[B, {num_classes}]: give the model {num_classes} outputs (its last layer), without a softmax"
        )


def _check_cross_fit(objective: Objective, features: Any) -> None:
    name = type(objective).__name__
    if objective.predicts:
        raise ValueError(f"{name} predicts with heads of its own, which CrossFit does not part: attach without it")
    if objective.reduction == "none":
        raise ValueError("reduction='none' is the loss of one network: use 'mean' or 'sum' with CrossFit")
    if objective.needs_features and features is None:
        raise ValueError(
            f"{name} needs features, which the copies of CrossFit each have in a space of their own: use "
            "attach(model, objective, features=...), nn.Identity() for those of a frozen backbone"
        )


def _shaped(logits: Tensor, shape: torch.Size) -> Tensor:
    return logits if len(shape) == 2 else logits.view(shape)  # FSDP2 warns of views


def _tell_length(objective: Objective, model: nn.Module) -> None:
    length = head_length(model)
    if length is not None:
        objective.set_feature_dim(length)


def unwrapped(model: nn.Module) -> CrowdModel:
    """The CrowdModel within ``torch.compile`` and ``DistributedDataParallel``.

    Raises:
        TypeError: there is none.
    """
    while not isinstance(model, CrowdModel):
        inner = getattr(model, "_orig_mod", getattr(model, "module", None))
        if not isinstance(inner, nn.Module):
            raise TypeError(f"model is {type(model).__name__} but must be what crowdnal.attach returned")
        model = inner
    return model
