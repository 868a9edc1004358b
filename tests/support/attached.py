"""What the tests of attached models share: objectives, a small classifier, random annotations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from crowdnal.data import Annotations
from crowdnal.objectives import CrowdLayer, GeoCrowdNet, MajorityVote, SoftMajorityVote, TraceRegularized
from support.compare import assert_close

C, R = 4, 6
ATTACHED = {
    "majority": MajorityVote,
    "soft": SoftMajorityVote,
    "crowd-layer": CrowdLayer,
    "crowd-layer VW+B": partial(CrowdLayer, variant="VW+B"),
    "trace": partial(TraceRegularized, scope="batch"),
    "crowd-layer rank": partial(CrowdLayer, rank=2, groups=[0, 1, 2, 0, 1, 3]),
    "geocrowdnet rank": partial(GeoCrowdNet, rank=2, volume_weight=0.0),
}


def labels(items: int, seed: int = 0) -> Annotations:
    dense = torch.randint(-1, C, (items, R), generator=torch.Generator().manual_seed(seed))
    return Annotations.from_dense(dense, num_classes=C).prepare()


def mlp(dim: int = 5, outputs: int = C) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(dim, 8), nn.ReLU(), nn.Linear(8, outputs))


def check_functional_call(model: nn.Module) -> None:
    """Gradients by torch.func are those of backward."""
    x, annotations = torch.randn(3, 5), labels(3)
    parameters = {key: value.detach() for key, value in model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (x, annotations)).loss

    gradients = torch.func.grad(loss)(parameters)
    model(x, annotations).loss.backward()
    assert_close(gradients, {key: p.grad for key, p in model.named_parameters()}, where="gradient")


def check_compiled(
    model: nn.Module,
    annotate: Callable[[int], Annotations] = lambda seed: labels(5, seed),
    backend: str = "aot_eager",
    device: str = "cpu",
    **tolerance: Any,
) -> None:
    """A compiled step equals the eager one; other annotations, and another number of them, compile nothing again."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda x, annotations: model(x, annotations), fullgraph=True, backend=counter)
    for seed in range(4):
        x, annotations = torch.randn(5, 5).to(device), annotate(seed).to(device)
        found = []
        for run in (model, compiled):
            model.zero_grad()
            loss = run(x, annotations).loss
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        assert_close(found[1], found[0], **tolerance, where="loss, gradients")
    assert counter.frame_count == 1
