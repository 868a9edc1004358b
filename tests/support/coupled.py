"""What the tests of CCC share: networks, data, and the meta gradient by create_graph, straight from the paper."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import crowdnal
from crowdnal import Annotations, CrowdDataset

C, R, N, G = 3, 7, 60, 3


class ConvNet(nn.Module):
    """Convolution, batch normalisation, ReLU in place, pooling, optional dropout, a linear layer."""

    def __init__(self, seed: int, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 2), nn.BatchNorm2d(6), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Dropout(dropout),
        )  # fmt: skip
        self.head = nn.Linear(6, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def images(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(N, 1, 8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def annotations(weighted: bool = False) -> Annotations:
    generator = torch.Generator().manual_seed(4)
    dense = torch.randint(-1, C, (N, R), generator=generator)
    dense[:, R - 1] = -1  # the last annotator labels nothing
    found = Annotations.from_dense(dense, num_classes=C)
    if not weighted:
        return found
    weight = torch.rand(found.num_annotations, generator=generator, dtype=torch.float64)
    return Annotations(
        found.indptr, found.annotator, found.label, num_annotators=R, num_classes=C, weight=weight,
        item_id=found.item_id,
    )  # fmt: skip


def network(seed: int, dtype: torch.dtype = torch.float64, *, dropout: float = 0.0, **options: Any) -> Any:
    """A network with a CrowdLayer whose matrices are away from their start."""
    model = crowdnal.attach(ConvNet(seed, dropout), crowdnal.CrowdLayer(C, R, **options)).to(dtype)
    with torch.no_grad():
        noise = torch.randn(R, C, C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        model.objective.annotators.weight += 0.3 * noise.to(dtype)
    return model


def coupled(dtype: torch.dtype = torch.float64, *, dropout: float = 0.0, start: bool = True, **options: Any) -> Any:
    """CCC on these data, in the first corrected epoch."""
    usual: dict[str, Any] = {"num_groups": G, "warmup_epochs": 0, "meta_size": 12, "meta_batch_size": 5}
    ccc = crowdnal.CCC(
        network(0, dtype, dropout=dropout), network(1, dtype, dropout=dropout), **usual | options
    ).train()
    if start:
        ccc.on_train_start(CrowdDataset(images(dtype), annotations()))
        ccc.on_epoch_start(0)
    return ccc


def optimizers(ccc: Any, make: Callable[..., Any] = torch.optim.SGD, **options: Any) -> tuple[Any, Any]:
    options = {"lr": 0.1, **options}
    return make(ccc.model_a.parameters(), **options), make(ccc.model_b.parameters(), **options)


def unrolled(
    model: Any,
    batch: tuple[Tensor, Any],
    meta: tuple[Tensor, Tensor],
    rate: Callable[[str], float],
    groups: Tensor,
    prefix: str,
) -> Tensor:
    """dL_meta/dV through the virtual step, by create_graph. Moves neither buffers nor the random state."""
    x, labels = batch
    model = copy.deepcopy(model)
    v = torch.zeros(G, C, C, dtype=torch.float64, requires_grad=True)
    weights = {n: p for n, p in model.named_parameters() if n.startswith(prefix)}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    state = torch.get_rng_state()
    p = functional_call(model, {**buffers}, (x,)).softmax(-1)
    corrected = model.objective.annotators.weight.detach()[labels.annotator] + v[groups[labels.annotator]]
    scores = torch.einsum("nc,nck->nk", p[labels.item], corrected)
    each = F.cross_entropy(scores, labels.label, reduction="none")
    w = torch.ones_like(each) if labels.weight is None else labels.weight
    items = len(labels.item.unique()) if model.objective.reduction == "per_item" else w.sum()
    loss = (w * each).sum() / items
    found = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    virtual = {n: t - rate(n) * g for (n, t), g in zip(weights.items(), found, strict=True)}
    meta_loss = F.cross_entropy(functional_call(model, {**buffers, **virtual}, (meta[0],)), meta[1])
    torch.set_rng_state(state)
    return torch.autograd.grad(meta_loss, v)[0]


def expected_correction(
    ccc: Any, k: int, batch: tuple[Tensor, Any], rate: Callable[[str], float], correction_rate: float = 0.5
) -> Tensor:
    """V of the next step of model k, by `unrolled` and the step rule."""
    model = (ccc.model_a, ccc.model_b)[k]
    ccc.meta_sets.restart()
    drawn = ccc.meta_sets.batch(k, ccc._seed_of(k), ccc._steps, torch.device("cpu"))
    ccc.meta_sets.restart()
    prefix = "backbone." if ccc.corrector.scope == "all" else "backbone.head."
    gradient = unrolled(model, batch, drawn, rate, ccc.groups[k], prefix)
    return -correction_rate * model.objective.annotators.weight.detach().max() / gradient.abs().max() * gradient
