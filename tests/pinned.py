"""Short training runs whose weights are pinned: what a change that should change nothing must not change.

``python tests/pinned.py`` prints what differs from ``pinned.json`` and, with ``--write``, replaces it. Bits depend on
torch and on the processor, so a canary (plain PyTorch, none of our code) says whether this machine can be held to them;
elsewhere numbers are compared with a tolerance.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import crowdnal
from crowdnal import simulation
from crowdnal.multilabel import MultiLabelDataset, TagClassifier, from_label_sets
from crowdnal.train import TrainConfig

FILE = Path(__file__).with_name("pinned.json")
C, R, N, D = 3, 7, 40, 5
SHOWN = 5

Pin = dict[str, Any]


def crowd() -> tuple[Tensor, crowdnal.Annotations]:
    """Features ``[N, D]`` and labels of them; the last annotator gave none."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(N) % C
    x = torch.randn(N, D, generator=generator) + 2 * torch.eye(C, D)[truth]
    confusions = simulation.symmetric_confusions(R - 1, C, 0.7)
    made = simulation.simulate(truth, confusions, annotations_per_item=3, seed=1)
    annotations = crowdnal.Annotations(made.indptr, made.annotator, made.label, num_annotators=R, num_classes=C)
    return x, annotations


class Network(nn.Module):
    """Gives logits and features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.head = nn.Linear(D, 8), nn.Linear(8, C)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.hidden(x).relu()
        return self.head(features), features


def loop(model: crowdnal.CrowdModel, data: Any, epochs: int = 3) -> Iterator[Tensor]:
    """Trains, and gives all weights."""
    loader = DataLoader(data, batch_size=10, collate_fn=crowdnal.collate)
    model.double()
    callback = crowdnal.ObjectiveCallback(model, loader)
    callback.on_epoch_start(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(epochs):
        if epoch:
            callback.on_epoch_start(epoch)
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            model(*batch).loss.backward()
            optimizer.step()
        callback.on_epoch_end(epoch)
    yield from (shown(name, value) for name, value in model.state_dict().items())


def shown(name: str, value: Any) -> Any:
    """An entry of a state, the history without the rows that no round has."""
    return value[value[:, 0] > 0] if name.endswith("_extra_state") and isinstance(value, Tensor) else value


def objective_run(name: str) -> Iterable[Tensor]:
    x, annotations = crowd()
    torch.manual_seed(0)
    options = {"dl-aggregate": {"method": "majority-vote"}, "doctor-net": {"feature_dim": 8}}
    options["weighted-doctor-net"] = {"feature_dim": 8}
    if name in ("conal", "lia"):
        options[name] = {"feature_dim": 8}
    model = crowdnal.attach(
        Network(), crowdnal.objectives.create(name, num_classes=C, num_annotators=R, **options.get(name, {}))
    )
    yield from loop(model, crowdnal.CrowdDataset(x.double(), annotations))
    if model.objective.models_annotators:
        yield model.objective.confusion()
    logits, features = model.eval().backbone(x.double())
    yield model.objective.posterior(logits, annotations, features)


def variant_run(objective: Callable[[], crowdnal.Objective]) -> Iterable[Tensor]:
    x, annotations = crowd()
    torch.manual_seed(0)
    yield from loop(crowdnal.attach(Network(), objective()), crowdnal.CrowdDataset(x.double(), annotations))


def ccc_run() -> Iterable[Tensor]:
    x, annotations = crowd()
    data = crowdnal.CrowdDataset(x, annotations)
    loader = DataLoader(data, batch_size=10, collate_fn=crowdnal.collate)
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, C))
        models.append(crowdnal.attach(net, crowdnal.CrowdLayer(C, R)))
    ccc = crowdnal.CCC(*models, num_groups=2, warmup_epochs=1, meta_size=12, meta_batch_size=6)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    torch.manual_seed(0)
    ccc.on_train_start(data)
    for epoch in range(3):
        ccc.on_epoch_start(epoch)
        ccc.train()
        for batch in loader:
            ccc.step(batch, *optimizers)
    yield from ccc.state_dict().values()


def multilabel_run() -> Iterable[Tensor]:
    table = {
        "task": [f"s{i}" for i in range(12) for _ in range(3)],
        "worker": [f"w{r}" for i in range(12) for r in range(3)],
        "label": [
            "|".join(t for k, t in enumerate("abc") if (i + r * k) % 3 != 1) for i in range(12) for r in range(3)
        ],
    }
    annotations = from_label_sets(table)
    data = MultiLabelDataset(
        torch.randn(12, D, generator=torch.Generator().manual_seed(0)).double(), annotations, num_tags=3
    )
    torch.manual_seed(0)
    model = crowdnal.attach(
        TagClassifier(nn.Identity(), num_tags=3, feature_dim=D), crowdnal.LIAML(2, 3, num_tags=3, feature_dim=D)
    )
    yield from loop(model, data)


def aggregation_run(name: str) -> Iterable[Tensor]:
    _, annotations = crowd()
    yield crowdnal.aggregate(annotations, name)


def command_run(objective: str, **options: Any) -> Iterable[Tensor]:
    """``crowdnal train`` on drawn pictures, as the tests run it."""
    from safetensors.torch import load_file
    from support import small_run

    with tempfile.TemporaryDirectory() as folder:
        root = small_run.write(Path(folder) / "data")
        make: Callable[..., TrainConfig] = small_run.frozen if options.pop("frozen", False) else small_run.config
        small_run.go(make(root, Path(folder) / "out", objective=objective, **options))
        for name in ("model.safetensors", "objective.safetensors"):
            yield from (shown(key, tensor) for key, tensor in sorted(load_file(Path(folder) / "out" / name).items()))


RUNS: Mapping[str, Callable[[], Iterable[Tensor]]] = {
    **{name: lambda name=name: objective_run(name) for name in crowdnal.objectives.OBJECTIVES},
    "crowd-layer VW+B": lambda: variant_run(lambda: crowdnal.CrowdLayer(C, R, variant="VW+B")),
    "crowd-layer rank": lambda: variant_run(lambda: crowdnal.CrowdLayer(C, R, rank=1)),
    "crowd-layer groups": lambda: variant_run(lambda: crowdnal.CrowdLayer(C, R, groups=[0, 0, 1, 1, 2, 2, 2])),
    "trace softmax batch": lambda: variant_run(
        lambda: crowdnal.TraceRegularized(C, R, normalization="softmax", scope="batch", warmup_epochs=1)
    ),
    "conal probabilities": lambda: variant_run(
        lambda: crowdnal.CoNAL(C, R, mixing="probabilities", feature_dim=8, scope="batch")
    ),
    "geocrowdnet W": lambda: variant_run(lambda: crowdnal.GeoCrowdNet(C, R, volume="W")),
    "single frobenius": lambda: variant_run(lambda: crowdnal.SingleConfusion(C, R, regularizer="frobenius")),
    "union-net A": lambda: variant_run(lambda: crowdnal.UnionNet(C, R, variant="A")),
    "cmm gradient": lambda: variant_run(lambda: crowdnal.CMM(C, R, training="gradient")),
    "cmm annotators": lambda: variant_run(lambda: crowdnal.CMM(C, R, grouped="annotators")),
    "dl-em incremental": lambda: variant_run(lambda: crowdnal.DLEM(C, R, incremental=True)),
    "max-mig votes": lambda: variant_run(lambda: crowdnal.MaxMIG(C, R, class_prior="votes", learn_class_prior=True)),
    "lia-ml": multilabel_run,
    "ccc": ccc_run,
    **{
        f"aggregate {name}": lambda name=name: aggregation_run(name)
        for name in ("majority-vote", "dawid-skene", "one-coin", "mmce", "worker-clustering")
    },
    "command crowd-layer": lambda: command_run("crowd-layer"),
    "command crowd-layer frozen": lambda: command_run("crowd-layer", frozen=True, holdout=0.2),
    "command dl-em frozen": lambda: command_run("dl-em", frozen=True),
}


def pin(tensors: Iterable[Tensor]) -> Pin:
    """A digest of all bits, and a few numbers of each tensor."""
    digest, numbers = hashlib.sha256(), []
    for tensor in tree_leaves(list(tensors)):
        if not isinstance(tensor, Tensor):
            digest.update(repr(tensor).encode())
            continue
        tensor = tensor.detach().cpu().contiguous()
        digest.update(str((tensor.dtype, tuple(tensor.shape))).encode() + tensor.numpy().tobytes())
        if tensor.is_floating_point():
            flat = tensor.double().flatten()
            numbers += [flat.sum().item(), *flat[:SHOWN].tolist()]
    return {"sha256": digest.hexdigest(), "numbers": numbers}


def canary() -> str:
    """Which bits plain PyTorch gives here."""
    generator = torch.Generator().manual_seed(0)
    outputs = [torch.tensor(float(crowdnal.backend()["cpu"] == "native"))]
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(64, 64, generator=generator, dtype=dtype)
        image = torch.randn(2, 3, 16, 16, generator=generator, dtype=dtype)
        kernel = torch.randn(4, 3, 3, 3, generator=generator, dtype=dtype)
        outputs += [x @ x, x.softmax(1), x.exp(), x.sigmoid(), x.abs().log(), torch.logsumexp(x, 1), x.sum(0)]
        outputs += [nn.functional.conv2d(image, kernel), x[:7, :5] @ x[:5, :3], x.tanh(), x.det()]
    return pin(outputs)["sha256"] + " " + torch.__version__ + " " + torch.backends.cpu.get_cpu_capability()


def run(name: str) -> Pin:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            return pin(RUNS[name]())
    finally:
        torch.set_num_threads(threads)


def main() -> None:
    found = {"canary": canary(), "runs": {name: run(name) for name in RUNS}}
    known = json.loads(FILE.read_text()) if FILE.exists() else {"canary": None, "runs": {}}
    print("same machine:", found["canary"] == known["canary"])
    for name, value in found["runs"].items():
        before = known["runs"].get(name)
        if before is None or before["sha256"] != value["sha256"]:
            print("differs:", name)
    if "--write" in sys.argv:
        FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
