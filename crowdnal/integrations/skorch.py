"""skorch: a net with scikit-learn's interface, whose labels are annotations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from skorch import NeuralNet
from skorch.callbacks import Callback
from torch import Tensor

from crowdnal.data import Annotations, CrowdDataset, collate
from crowdnal.training import CrowdModel, ObjectiveCallback, param_groups


class CrowdNet(NeuralNet):
    """Fits a CrowdModel; ``predict`` gives classes ``[N]``, ``predict_proba`` their probabilities ``[N, C]``.

        net = CrowdNet(crowdnal.attach(network, crowdnal.CrowdLayer(8, 59)), max_epochs=20, lr=1e-3)
        net.fit(images, annotations).predict(images)

    The objective's hooks are called, so that EM-style ones work; there is no validation split, as nobody's labels are
    true. Other options are skorch's.

    Args:
        module: of :func:`crowdnal.attach`.
        objective_lr: default ``lr``.
        **kwargs: of ``skorch.NeuralNet``.
    """

    def __init__(self, module: CrowdModel, *, objective_lr: float | None = None, **kwargs: Any) -> None:
        self.objective_lr = objective_lr
        kwargs.setdefault("optimizer", torch.optim.Adam)
        kwargs.setdefault("criterion", torch.nn.Identity)
        kwargs.setdefault("train_split", None)
        super().__init__(module, **kwargs)

    def initialize_optimizer(self, *args: Any, **kwargs: Any) -> CrowdNet:
        """The objective at a rate of its own."""
        options = self.get_params_for("optimizer")
        rate = options.pop("lr", self.lr)
        decay = options.pop("weight_decay", 0.0)
        groups = param_groups(self.module_, rate, decay, objective_lr=self.objective_lr)
        self.optimizer_ = self.optimizer(groups, lr=rate, **options)
        return self

    @property
    def _default_callbacks(self) -> list[tuple[str, Callback]]:
        return [("objective", _Hooks()), *(pair for pair in super()._default_callbacks if pair[0] != "valid_acc")]

    def get_dataset(self, X: Any, y: Any = None) -> Any:  # noqa: N803  (skorch's)
        """Items with their annotations."""
        return CrowdDataset(X, y) if isinstance(y, Annotations) else super().get_dataset(X, y)

    def get_iterator(self, dataset: Any, training: bool = False) -> Any:
        """Batches with annotations."""
        if isinstance(dataset, CrowdDataset):
            size = self.batch_size if self.batch_size > 0 else max(len(dataset), 1)
            return torch.utils.data.DataLoader(dataset, size, shuffle=training, collate_fn=collate)
        return super().get_iterator(dataset, training=training)

    def train_step_single(self, batch: Any, **fit_params: Any) -> dict[str, Tensor]:
        """Loss and logits of a batch."""
        self._set_training(True)
        images, annotations = batch
        loss, logits = self.module_(images.to(self.device), annotations.to(self.device))
        loss.backward()
        return {"loss": loss, "y_pred": logits}

    def predict_proba(self, X: Any) -> np.ndarray:  # noqa: N803
        """``[N, C]``."""
        return torch.cat([logits.softmax(-1).cpu() for logits in self.forward_iter(X)]).numpy()

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """``[N]``, the most probable class."""
        return self.predict_proba(X).argmax(1)


class _Hooks(Callback):
    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **_: Any) -> None:  # noqa: N803
        dataset = X if isinstance(X, CrowdDataset) else net.get_dataset(X, y)
        self.callback_ = ObjectiveCallback(net.module_, net.get_iterator(dataset))
        self.first_ = len(net.history)

    def on_epoch_begin(self, net: Any, **_: Any) -> None:
        self.callback_.on_epoch_start(len(net.history) - 1 - self.first_)

    def on_epoch_end(self, net: Any, **_: Any) -> None:
        self.callback_.on_epoch_end(len(net.history) - 1 - self.first_)
