"""One step of one model: virtual, meta, actual (Zhang et al. 2024, eqs. 10 to 12), with one training pass for both."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from crowdnal._utils.distributed import num_processes, sum_over_processes, sum_together
from crowdnal.ccc.data import MetaBatch
from crowdnal.ccc.meta_gradient import (
    correction,
    correction_gradient,
    difference_tangent,
    exact_tangent,
    gradients_of,
    head_tangent,
    meta_direction,
)
from crowdnal.ccc.passes import RandomState, Weights, kept_random_state
from crowdnal.confusion import FreeConfusion
from crowdnal.data import Annotations, as_annotations
from crowdnal.functional import crowd_cross_entropy
from crowdnal.objectives import Objective
from crowdnal.training import CrowdModel, batch_shares, is_timm

Scope = Literal["all", "head"]
Meta = Literal["auto", "exact", "finite_difference"]
Optimizer = torch.optim.Optimizer


class CCCOutput(NamedTuple):
    """What a step of both models gives, on the device: nothing waits for it.

    Attributes:
        loss_a: the loss ``[]`` of model a, under corrected confusions after the warm-up.
        loss_b: of model b.
        correction_a: V ``[G, C, C]`` of this step, or None in the warm-up.
        correction_b: of model b.
    """

    loss_a: Tensor
    loss_b: Tensor
    correction_a: Tensor | None
    correction_b: Tensor | None


@dataclass
class Corrector:
    """Takes the steps of both models.

    Attributes:
        num_groups: G.
        rate: correction rate, above 0.
        scope: which weights the virtual step moves.
        meta: how the change of the probabilities is found; ``"auto"`` becomes ``"finite_difference"`` when an op is met
            that has no forward mode.
    """

    num_groups: int
    rate: float
    scope: Scope
    meta: Meta

    def step(
        self,
        model: CrowdModel,
        images: Tensor,
        annotations: Annotations | Tensor,
        optimizer: Optimizer,
        scaler: Any,
        meta_batch: MetaBatch,
        groups: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The loss ``[]`` under the corrected confusions and the correction V ``[G, C, K]``, both detached.

        Of several processes each gives its part of the batch; the results are those of all of it.
        """
        objective, confusion = model.objective, confusion_of(model)
        rates = self._rates(model, optimizer)
        factor = None if scaler is None else scaler.scale(torch.ones((), device=images.device))
        drawn = RandomState(images.device)
        logits, features = self._forward(model, images)
        logits, annotations, *_ = objective.as_batch(logits, annotations)
        with torch.autocast(images.device.type, enabled=False):
            p = logits.softmax(-1)
            share = _share(objective, annotations)
            plain = share * crowd_cross_entropy(p, confusion.detach(), annotations, reduction=objective.reduction)
            moved = {name: model.get_parameter(name) for name in rates}
            gradients = gradients_of(plain, moved, factor, retain_graph=True)
            sum_together(gradients.values())
            virtual = {name: moved[name].detach() - rates[name] * gradients[name] for name in rates}
        del gradients
        with kept_random_state(images.device):
            direction = meta_direction(model, virtual, rates, *meta_batch, factor)
            sum_together(direction.values())  # of one meta batch in all processes, but what is drawn in each differs
            direction = {name: part / num_processes() for name, part in direction.items()}
            del virtual
            tangent = self._tangent(model, direction, images, drawn, p.detach(), features)
        with torch.autocast(images.device.type, enabled=False):
            given = p.detach(), tangent, confusion.detach(), annotations, groups, self.num_groups
            gradient = sum_over_processes(share * correction_gradient(*given, objective.reduction))
            v = correction(gradient, confusion, self.rate)
            loss = share * crowd_cross_entropy(p, confusion + v[groups], annotations, reduction=objective.reduction)
            update(loss, optimizer, scaler)
        return sum_over_processes(loss.detach().clone()), v

    def _forward(self, model: CrowdModel, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits and, for the head, what it was given."""
        if self.scope == "all":
            return model(images), None
        seen: list[tuple[Tensor, Tensor]] = []
        head = model.get_submodule(head_of(model))
        handle = head.register_forward_hook(lambda module, args, output: seen.append((args[0].detach(), output)))
        try:
            logits = model(images)
        finally:
            handle.remove()
        if len(seen) != 1 or seen[0][1].shape != logits.shape or seen[0][1].data_ptr() != logits.data_ptr():
            raise ValueError(
                f"the logits of {type(model.backbone).__name__} are not the output of its last linear layer "
                f"({head_of(model)}): use scope='all'"
            )
        return logits, seen[0][0]

    def _rates(self, model: CrowdModel, optimizer: Optimizer) -> dict[str, float | Tensor]:
        """The current learning rate of every weight that the virtual step moves."""
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        prefix = "backbone." if self.scope == "all" else head_of(model) + "."
        found = {
            name: rates[id(p)]
            for name, p in model.named_parameters()
            if name.startswith(prefix) and p.requires_grad and id(p) in rates
        }
        if not found:
            raise ValueError(
                f"the optimizer holds no trainable parameter of {prefix[:-1]} of its model: make optimizer_a of "
                "ccc.model_a.parameters() and optimizer_b of ccc.model_b.parameters()"
            )
        return found

    def _tangent(
        self,
        model: CrowdModel,
        direction: Weights,
        images: Tensor,
        drawn: RandomState,
        p: Tensor,
        features: Tensor | None,
    ) -> Tensor:
        if features is not None:
            head = head_of(model)
            zero = torch.zeros_like(model.get_parameter(f"{head}.weight"))
            return head_tangent(features, p, direction.get(f"{head}.weight", zero), direction.get(f"{head}.bias"))
        if self.meta != "finite_difference":
            try:
                return exact_tangent(model, direction, images, drawn)
            except NotImplementedError as error:
                if self.meta == "exact":
                    raise NotImplementedError(
                        f"meta='exact' needs forward-mode derivatives, which an op of {type(model.backbone).__name__} "
                        f"does not have ({error}): use meta='finite_difference'"
                    ) from error
                warnings.warn(
                    f"an op of {type(model.backbone).__name__} has no forward-mode derivative ({error}): meta "
                    "gradients come from finite differences from here on",
                    stacklevel=4,
                )
                self.meta = "finite_difference"
        return difference_tangent(model, direction, images, drawn, p)


def plain_step(
    model: CrowdModel, images: Tensor, annotations: Annotations | Tensor, optimizer: Optimizer, scaler: Any
) -> Tensor:
    """A step of CrowdLayer; the loss ``[]``, detached."""
    loss = model(images, annotations).loss
    if num_processes() > 1:
        objective = model.objective
        sizes = {"num_annotators": objective.num_annotators, "num_classes": objective.num_labels}
        loss = loss * _share(objective, as_annotations(annotations, **sizes))
    with torch.autocast(images.device.type, enabled=False):
        update(loss, optimizer, scaler)
    return sum_over_processes(loss.detach().clone())


def _share(objective: Objective, annotations: Annotations) -> Tensor | float:
    """What this process's part of a batch counts in the loss of all of it: the parts' sum."""
    return 1.0 if num_processes() == 1 else batch_shares(objective, [annotations])[0] / num_processes()


def update(loss: Tensor, optimizer: Optimizer, scaler: Any) -> None:
    """A step of the optimizer, through the scaler if there is one."""
    optimizer.zero_grad(set_to_none=True)
    if scaler is None:
        loss.backward()
        _sum_gradients(optimizer)
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        _sum_gradients(optimizer)
        scaler.step(optimizer)
    torch.clear_autocast_cache()  # else an autocast region around the loop would go on with the old weights


def _sum_gradients(optimizer: Optimizer) -> None:
    sum_together(p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def confusion_of(model: CrowdModel) -> nn.Parameter:
    """W ``[R, C, K]``."""
    return cast(FreeConfusion, model.objective.annotators).weight


def head_of(model: CrowdModel) -> str:
    """Name of the last linear layer: timm's classifier, else the last there is, or ``""``."""
    classifier = cast(Any, model.backbone).get_classifier() if is_timm(model.backbone) else None
    linear = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith("backbone")]
    names = [name for name, module in linear if module is classifier] or [name for name, _ in linear]
    return names[-1] if names else ""
