"""What the README shows is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from support.compare import assert_close

import crowdnal
from crowdnal import simulation

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


def test_five_lines_train_a_timm_model() -> None:
    code = next(block for block in BLOCKS if "crowdnal.attach" in block)
    assert 'timm.create_model("resnet50", pretrained=True' in code
    runnable = code.replace('"resnet50", pretrained=True', '"test_resnet", pretrained=False')  # no download in a test
    build, loop = runnable.split("for images, annotations")
    truth = torch.arange(32) % 8
    annotations = simulation.simulate(
        truth, simulation.symmetric_confusions(59, 8, 0.8), annotations_per_item=3, seed=0
    )
    images = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    loader = [(images[rows], annotations[rows]) for rows in torch.arange(32).split(8)]
    scope: dict[str, Any] = {"loader": loader}
    exec(build, scope)
    model = scope["model"]
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    scope["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    exec("for images, annotations" + loop, scope)
    assert scope["logits"].shape == (8, 8)
    assert all(not torch.equal(before[name], value) for name, value in model.named_parameters())
    confusion = model.objective.confusion()
    assert confusion.shape == (59, 8, 8)
    assert_close(confusion.sum(2), torch.ones(59, 8))


def test_reading_annotations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = next(block for block in BLOCKS if "from_long" in block)
    monkeypatch.chdir(tmp_path)
    Path("answers.csv").write_text("task,worker,label\na.jpg,ann,0\nb.jpg,ann,1\nb.jpg,bob,0\n", encoding="utf-8")
    matrix = torch.tensor([[0, -1], [1, 0]])
    scope: dict[str, Any] = {"matrix": matrix, "images": torch.zeros(2, 3, 4, 4), "torch": torch, "crowdnal": crowdnal}
    exec(code, scope)
    assert scope["annotations"].to_dense().equal(matrix)
    ((images, annotations),) = list(scope["loader"])
    assert images.shape == (2, 3, 4, 4) and annotations.num_annotations == 3


def test_the_callback_of_em(capsys: pytest.CaptureFixture[str]) -> None:
    code = next(block for block in BLOCKS if "ObjectiveCallback" in block)
    truth = torch.arange(32) % 8
    confusions = simulation.symmetric_confusions(59, 8, 0.8)
    annotations = simulation.simulate(truth, confusions, annotations_per_item=3, seed=0)
    backbone = torch.nn.Linear(8, 8)
    dataset = crowdnal.CrowdDataset(torch.eye(8)[truth], annotations)
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=crowdnal.collate)
    optimizer = torch.optim.Adam(backbone.parameters(), lr=0.1)
    scope: dict[str, Any] = {"backbone": backbone, "loader": loader, "optimizer": optimizer, "crowdnal": crowdnal}
    exec(code, {**scope, "epochs": 3})
    assert capsys.readouterr().out.count("Round(") == 2


def test_methods_of_the_table_are_those_that_exist() -> None:
    table = re.findall(r"^\| `([\w-]+)` \| `(\w+)\(", README, flags=re.M)
    assert {name: cls for name, cls in table} == {
        name: cls.__name__ for name, cls in crowdnal.objectives.OBJECTIVES.items()
    }


def test_two_networks_that_correct_each_other() -> None:
    code = next(block for block in BLOCKS if "crowdnal.CCC" in block)
    code = code.replace('"resnet18"', '"test_resnet"').replace("range(60)", "(9, 10)")
    build, rest = code.split("ccc.on_train_start")
    images = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    confusions = simulation.symmetric_confusions(59, 8, 0.8)
    annotations = simulation.simulate(torch.arange(32) % 8, confusions, annotations_per_item=3, seed=0)
    dataset = crowdnal.CrowdDataset(images, annotations)
    loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True, collate_fn=crowdnal.collate)
    scope: dict[str, Any] = {"loader": loader, "dataset": dataset, "images": images, "timm": timm, "crowdnal": crowdnal}
    exec(build, scope)
    ccc = scope["ccc"]
    for name, model in (("optimizer_a", ccc.model_a), ("optimizer_b", ccc.model_b)):
        scope[name] = torch.optim.SGD(model.parameters(), lr=0.1)
    exec("ccc.on_train_start" + rest, scope)
    assert ccc.corrects and ccc.groups.unique().numel() > 1
    assert_close(scope["probs"].sum(1), torch.ones(32))
