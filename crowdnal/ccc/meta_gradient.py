"""The gradient of the meta loss for the correction V, with no second-order graph through the backbone.

The virtual step is ``t^ = t - lr * dL_tra(W + V, t)/dt`` at V = 0, and ``v = dL_meta/dt`` at ``t^``. Then
``dL_meta/dV = -d/dV <lr v, dL_tra(W + V, t)/dt>``, and the bracket is the derivative of L_tra along ``lr v``. With the
change ``p. = J(p) lr v`` of the probabilities, which one forward-mode pass gives,

    dL_meta/dV_g = -sum over annotations n of group g of (p_i q_n^T + p._i g_n^T)
    g_n = w_n (s_n - e_y),  q_n = w_n (diag(s_n) - s_n s_n^T) (p._i W_r),  s_n = softmax(p_i W_r)

which is what the double backward of the softmax link is made of (Zhang et al. 2024, eq. 9, written out).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from crowdnal import reference
from crowdnal.ccc.passes import RandomState, Weights, at_least_float32, logits_at, probabilities
from crowdnal.data import Annotations
from crowdnal.functional import Reduction, mix, mix_annotators
from crowdnal.functional.reduction import reduction_weights

# of sqrt(eps): on a resnet18 with batch normalisation, in float32, V is then within 0.3 % of the exact one; curvature
# makes it 6 % at 1
DIFFERENCE = 0.01


def meta_direction(
    model: nn.Module,
    virtual: Weights,
    rates: Mapping[str, float | Tensor],
    images: Tensor,
    labels: Tensor,
    scale: Tensor | None = None,
) -> dict[str, Tensor]:
    """``lr v``: the gradient of the backbone's cross-entropy on the meta batch at the virtual weights, times lr.

    Args:
        model: gives logits ``[B, C]``.
        virtual: the virtual weights, by name.
        rates: learning rate of each.
        images: of the meta batch.
        labels: ``[B]`` its pseudo labels.
        scale: of the loss while it is differentiated (float16), or None.
    """
    leaves = {name: weight.detach().requires_grad_() for name, weight in virtual.items()}
    with torch.enable_grad():
        logits = logits_at(model, leaves, images)
        with torch.autocast(logits.device.type, enabled=False):
            loss = F.cross_entropy(at_least_float32(logits), labels)
            gradients = gradients_of(loss, leaves, scale)
    return {name: rates[name] * gradient for name, gradient in gradients.items()}


def gradients_of(
    loss: Tensor, weights: Weights, scale: Tensor | None = None, *, retain_graph: bool = False
) -> dict[str, Tensor]:
    """Gradient of the loss for each weight, zero where it has none."""
    scaled = loss if scale is None else loss * scale
    found = torch.autograd.grad(
        scaled, list(weights.values()), retain_graph=retain_graph, allow_unused=True, materialize_grads=True
    )
    return {n: g if scale is None else g / scale for n, g in zip(weights, found, strict=True)}


@torch.no_grad()
def exact_tangent(model: nn.Module, direction: Weights, images: Tensor, drawn: RandomState) -> Tensor:
    """Change ``[B, C]`` of the probabilities along the direction, by one forward-mode pass.

    Raises:
        NotImplementedError: where an op of the model has no forward-mode derivative.
    """
    parameters = dict(model.named_parameters())
    drawn.restore()
    # the fused attention kernels have no forward mode, the plain formula has
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        moving = {name: forward_ad.make_dual(parameters[name].detach(), v) for name, v in direction.items()}
        p, tangent = forward_ad.unpack_dual(probabilities(logits_at(model, moving, images)))
    return torch.zeros_like(p) if tangent is None else tangent


@torch.no_grad()
def difference_tangent(
    model: nn.Module, direction: Weights, images: Tensor, drawn: RandomState, start: Tensor
) -> Tensor:
    """The same by one more forward pass: a one-sided difference, whose step is a small part of the weights' norm.

    Mixed precision is too coarse for a difference: both ends are then computed without it.

    Args:
        model: gives logits ``[B, C]``.
        direction: by name of the parameter.
        images: of the batch.
        drawn: the random state at the start of the training pass.
        start: ``[B, C]`` probabilities at the weights as they are, used where autocast is off.
    """
    here = {name: p.detach() for name, p in model.named_parameters() if name in direction}
    size, length = _norm(here.values()), _norm(direction.values())
    eps = DIFFERENCE * torch.finfo(size.dtype).eps ** 0.5 * size / length
    eps = torch.where((size > 0) & (length > 0), eps, 1.0)

    def at(weights: Weights) -> Tensor:
        drawn.restore()
        return probabilities(logits_at(model, weights, images))

    device = images.device.type
    mixed = torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False):
        end = at({name: p + eps * direction[name] for name, p in here.items()})
        return (end - (at(here) if mixed else start)) / eps


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([at_least_float32(t).norm() for t in tensors]).norm()


def head_tangent(features: Tensor, p: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same in closed form where only the last linear layer moves, by ``weight [C, D]`` and ``bias [C]``."""
    with torch.autocast(p.device.type, enabled=False):
        moved = F.linear(features.to(p.dtype), weight.to(p.dtype), None if bias is None else bias.to(p.dtype))
    return p * (moved - (p * moved).sum(-1, keepdim=True))


@torch.no_grad()
def correction_gradient(
    p: Tensor,
    tangent: Tensor,
    confusion: Tensor,
    annotations: Annotations,
    groups: Tensor,
    num_groups: int,
    reduction: Reduction = "mean",
) -> Tensor:
    """``dL_meta/dV [G, C, K]`` at V = 0.

    Args:
        p: ``[B, C]`` probabilities.
        tangent: ``[B, C]``, their change along ``lr v``.
        confusion: ``[R, C, K]``, W.
        annotations: of the B items.
        groups: ``[R]`` group of each annotator.
        num_groups: G.
        reduction: of the training loss.
    """
    weight, mean = reduction_weights(annotations, annotations.weight, reduction, p.dtype)
    probs = mix(p, confusion, annotations).softmax(-1)
    moved = mix(tangent, confusion, annotations)
    upstream = p.new_ones(annotations.num_annotations, 1) if weight is None else weight.unsqueeze(1)
    if mean:
        upstream = upstream / max(annotations.num_annotations, 1)
    residual = upstream * reference.residual(probs, annotations.label)
    curved = upstream * probs * (moved - (probs * moved).sum(1, keepdim=True))
    grouped = annotations.regroup(groups, num_groups)
    return -(mix_annotators(p, curved, grouped) + mix_annotators(tangent, residual, grouped))


def correction(gradient: Tensor, confusion: Tensor, rate: float) -> Tensor:
    """``V = -rate max(W) / max|gradient| gradient``, 0 where the gradient is 0 (Zhang et al. 2024, appendix)."""
    peak = gradient.abs().amax()
    step = torch.where(peak > 0, rate * confusion.detach().amax() / peak, 0.0)
    return -step * gradient
