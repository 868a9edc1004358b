"""What the README shows is run, and it stays a page that one reads in a minute."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import assert_close
from support.pages import blocks, run, text_of

import crowdnal
from crowdnal import objectives, simulation

README = text_of("README.md")
ATTACH, READ = blocks(README)


def test_it_is_short_and_names_the_two_commands() -> None:
    assert len(README.splitlines()) <= 135
    assert '\npip install ".[demo]" && crowdnal demo\n' in README
    assert '\npip install ".[test]" && pytest\n' in README


def test_five_lines_train_a_timm_model() -> None:
    assert 'timm.create_model("resnet50", pretrained=True' in ATTACH
    runnable = ATTACH.replace('"resnet50", pretrained=True', '"test_resnet", pretrained=False')  # no download in a test
    build, loop = runnable.split("for images, annotations")
    truth = torch.arange(32) % 8
    annotations = simulation.simulate(
        truth, simulation.symmetric_confusions(59, 8, 0.8), annotations_per_item=3, seed=0
    )
    images = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    loader = [(images[rows], annotations[rows]) for rows in torch.arange(32).split(8)]
    scope: dict[str, Any] = {"loader": loader}
    run(build, scope)
    model = scope["model"]
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    scope["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    run("for images, annotations" + loop, scope)
    assert scope["logits"].shape == (8, 8)
    assert all(not torch.equal(before[name], value) for name, value in model.named_parameters())
    confusion = model.objective.confusion()
    assert confusion.shape == (59, 8, 8)
    assert_close(confusion.sum(2), torch.ones(59, 8), where="sums of rows")


def test_reading_annotations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("answers.csv").write_text("task,worker,label\na.jpg,ann,0\nb.jpg,ann,1\nb.jpg,bob,0\n", encoding="utf-8")
    matrix = torch.tensor([[0, -1], [1, 0]])
    scope: dict[str, Any] = {"matrix": matrix, "images": torch.zeros(2, 3, 4, 4), "torch": torch, "crowdnal": crowdnal}
    run(READ, scope)
    assert scope["annotations"].to_dense().equal(matrix)
    ((images, annotations),) = list(scope["loader"])
    assert images.shape == (2, 3, 4, 4) and annotations.num_annotations == 3


def test_methods_of_the_table_are_those_that_exist() -> None:
    assert f"\n\n{objectives.table()}\n\n" in README
    named = re.findall(r"^\| `([\w-]+)` \| `(\w+)\(.*?\)` \|", text_of("docs/methods.md"), flags=re.M)
    assert sorted(named) == sorted(re.findall(r"^\| `([\w-]+)` \| `(\w+)` \|", objectives.table(), flags=re.M))
