"""Lightning's Trainer: the module, the callback in a module of one's own, and what it finds in a batch."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from support.attached import C, R, labels, mlp
from torch.utils.data import DataLoader

import crowdnal

lightning = pytest.importorskip("lightning.pytorch")
from crowdnal.integrations.lightning import CrowdCallback, CrowdModule  # noqa: E402

N = 16


def data(shuffle: bool = False) -> DataLoader:
    x = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
    return DataLoader(crowdnal.CrowdDataset(x, labels(N)), 4, shuffle=shuffle, collate_fn=crowdnal.collate)


def fit(module: Any, *callbacks: Any, epochs: int = 3, checkpoint: Any = None, **options: Any) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(max_epochs=epochs, callbacks=list(callbacks), **quiet, **options)
        trainer.fit(module, data(), ckpt_path=checkpoint)
    return trainer


def by_hand(objective: crowdnal.Objective, epochs: int = 3) -> crowdnal.CrowdModel:
    model = crowdnal.attach(mlp(), objective)
    optimizer = torch.optim.AdamW(crowdnal.param_groups(model, 1e-2))
    callback = crowdnal.ObjectiveCallback(model, data())
    for epoch in range(epochs):
        callback.on_epoch_start(epoch)
        for x, a in data():
            optimizer.zero_grad()
            model(x, a).loss.backward()
            optimizer.step()
        callback.on_epoch_end(epoch)
    return model


@pytest.mark.parametrize("make", [crowdnal.CrowdLayer, crowdnal.DLEM])
def test_the_module_is_the_loop_written_by_hand(make: Any) -> None:
    module = CrowdModule(crowdnal.attach(mlp(), make(C, R)), lr=1e-2)
    trainer = fit(module)
    assert float(trainer.callback_metrics["train_loss"]) > 0
    expected = by_hand(make(C, R)).state_dict()
    for name, value in module.model.state_dict().items():
        assert torch.equal(value, expected[name]), name


class Own(lightning.LightningModule):
    """As people write it: self.log without a batch_size."""

    def __init__(self) -> None:
        super().__init__()
        self.net = crowdnal.attach(mlp(), crowdnal.DLEM(C, R))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(*batch).loss
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(crowdnal.param_groups(self.net, 1e-2))


def test_the_callback_in_a_module_of_ones_own(tmp_path: Any) -> None:
    module = Own()
    trainer = fit(module, CrowdCallback())
    expected = by_hand(crowdnal.DLEM(C, R)).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in module.net.state_dict().items())

    half = Own()
    trainer = fit(half, CrowdCallback(), epochs=2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = Own()
    fit(resumed, CrowdCallback(), checkpoint=tmp_path / "half.ckpt")
    assert all(torch.equal(value, expected[name]) for name, value in resumed.net.state_dict().items())

    with pytest.raises(ValueError, match="BoringModel has 0 CrowdModels but must have one"):
        from lightning.pytorch.demos.boring_classes import BoringModel

        CrowdCallback().on_train_start(trainer, BoringModel())


def test_lightning_finds_the_batch_size() -> None:
    from lightning.pytorch.utilities.data import extract_batch_size

    batch = next(iter(data()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert extract_batch_size(batch) == 4
        assert extract_batch_size({"annotations": batch[1], "images": batch[0]}) == 4
