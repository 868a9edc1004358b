"""timm's own loop: create_loader, create_optimizer_v2, EMA, checkpoints and Mixup around a CrowdTask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.attached import C, R, labels
from support.compare import assert_close

import crowdnal

timm = pytest.importorskip("timm")
pytest.importorskip("timm.task")
from timm.data import create_loader  # noqa: E402
from timm.optim import create_optimizer_v2  # noqa: E402
from timm.utils import CheckpointSaver  # noqa: E402

from crowdnal.integrations.timm import CrowdMixup, CrowdTask  # noqa: E402


class Pictures(torch.utils.data.Dataset[Any]):
    """PIL images, as timm's data sets have them."""

    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        image = pytest.importorskip("PIL.Image").new("RGB", (40, 40), (30 * index, 0, 0))
        return (image if self.transform is None else self.transform(image)), index


class Untransformed(Pictures):
    def __init__(self) -> None:
        pass

    def __getitem__(self, index: int) -> Any:
        return pytest.importorskip("PIL.Image").new("RGB", (40, 40), (30 * index, 0, 0)), index


def loader(dataset: Any, **options: Any) -> Any:
    return create_loader(
        crowdnal.CrowdDataset(dataset, labels(8)), input_size=(3, 32, 32), batch_size=4, use_prefetcher=False,
        num_workers=0, persistent_workers=False, collate_fn=crowdnal.collate, device=torch.device("cpu"), **options,
    )  # fmt: skip


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=C)


@pytest.mark.parametrize("dataset", [Pictures, Untransformed])
def test_create_loaders_transform_reaches_the_images(dataset: Any) -> None:
    (images, annotations), second = loader(dataset())
    assert images.shape == (4, 3, 32, 32) and len(annotations) == len(second[1]) == 4
    assert float(images[0, 0].mean()) < float(images[3, 0].mean())


@pytest.mark.parametrize("name", ["crowd-layer", "conal", "dl-em", "doctor-net"])
def test_a_task_is_the_crowd_model_and_its_checkpoint_the_plain_model(name: str, tmp_path: Path) -> None:
    objective = crowdnal.objectives.create(name, num_classes=C, num_annotators=R)
    task = CrowdTask(net(), objective)
    optimizer = create_optimizer_v2(task.get_trainable_module(), opt="adamw", lr=1e-3, weight_decay=0.05)
    task.setup_ema(decay=0.5)  # before training begins, as everybody does
    batches = loader(Pictures())
    callback = crowdnal.ObjectiveCallback(task.get_trainable_module(), batches)
    before = {key: value.clone() for key, value in objective.state_dict().items()}
    for epoch in range(2):
        callback.on_epoch_start(epoch)
        task.train()
        for images, given in batches:
            result = task(images, given)
            expected = task.get_trainable_module()(images, given)
            assert result["output"].shape == (4, C) and result["loss"].shape == expected.loss.shape == ()
            result["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            task.update_ema()
    assert not all(torch.equal(value, before[key]) for key, value in objective.state_dict().items())
    task.eval()
    shown = task.get_eval_model()
    assert (shown is task.trainable_module) == (name == "doctor-net")
    assert torch.equal(shown(images), task.trainable_module(images))

    averaged = task.get_eval_model(ema=True)
    assert averaged is not None and averaged(images).shape == (4, C)
    assert not torch.equal(averaged(images), shown(images))
    assert set(task.get_checkpoint_state(ema=True)["state_dict_ema"]) == set(shown.state_dict())
    state = task.get_checkpoint_state()
    if name != "doctor-net":
        assert set(state["state_dict"]) == set(net().state_dict())
    saver = CheckpointSaver(model=shown, optimizer=optimizer, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path))
    saver.save_checkpoint(0, metric=1.0)
    other = CrowdTask(net(), crowdnal.objectives.create(name, num_classes=C, num_annotators=R))
    if name == "conal":
        other(images, given)
    other.load_checkpoint_state(state["state_dict"], state["task_state"])
    for key, value in task.trainable_module.state_dict().items():
        assert_close(other.trainable_module.state_dict()[key], value)


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_mixup_is_the_mixture_of_both_losses(mode: str) -> None:
    torch.manual_seed(0)
    images, a = torch.rand(6, 3, 8, 8), labels(6)
    mixup = CrowdMixup(mixup_alpha=0.4, cutmix_alpha=0.0, mode=mode, num_classes=C)
    x, both = mixup(images.clone(), a)
    # the share of each item's own image is read off the images themselves
    away = images.flip(0) - images
    share = 1 - ((x - images) * away).flatten(1).sum(1) / away.square().flatten(1).sum(1)
    logits = torch.randn(6, C)
    each = crowdnal.CrowdLayer(C, R, reduction="none")
    own, other = each(logits, a), each(logits, a[list(range(5, -1, -1))])
    item = torch.arange(6).repeat_interleave(a.counts)
    expected = (own * share[item]).sum()
    flipped = torch.arange(6).repeat_interleave(a.counts.flip(0))
    expected = expected + (other * (1 - share)[flipped]).sum()
    assert_close(crowdnal.CrowdLayer(C, R, reduction="sum")(logits, both), expected, rtol=1e-4, atol=1e-4)
    assert both.item_id is None
    with pytest.raises(ValueError, match="a batch of 5 items: Mixup needs an even number"):
        mixup(images[:5], a[:5])


def test_the_example_trains_on_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """timm's loop in examples: the loss falls, the checkpoint is a plain model, EM makes its rounds."""
    import runpy

    image = pytest.importorskip("PIL.Image")
    (tmp_path / "photos" / "a").mkdir(parents=True)
    rows = ["task,worker,label"]
    for i in range(12):
        image.new("RGB", (40, 40), (250 * (i % 2), 0, 250 * (1 - i % 2))).save(tmp_path / "photos" / "a" / f"{i}.png")
        rows += [f"a/{i}.png,w{r},{i % 2}" for r in range(2)]
    (tmp_path / "answers.csv").write_text("\n".join(rows))
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "timm_loop.py"))["main"]
    words = [str(tmp_path / "photos"), str(tmp_path / "answers.csv"), "--model", "test_resnet", "--batch-size", "6"]
    task = example([*words, "--objective", "dl-em", "--epochs", "2", "--out", str(tmp_path / "out.pt")])
    assert len(task.trainable_module.objective.history) == 1 and len(task.trainable_module.objective.targets) == 12
    plain = timm.create_model("test_resnet", num_classes=2)
    plain.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True)["state_dict"])
