"""CCC: two CrowdLayers that correct each other's confusions."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from crowdnal._utils.distributed import from_first
from crowdnal.aggregation.clustering import cluster_matrices
from crowdnal.ccc.checks import check_data, check_models, check_options
from crowdnal.ccc.data import Items
from crowdnal.ccc.meta_sets import MetaSets
from crowdnal.ccc.passes import at_least_float32
from crowdnal.ccc.step import CCCOutput, Corrector, Meta, Optimizer, Scope, confusion_of, plain_step
from crowdnal.data import Annotations, CrowdDataset
from crowdnal.objectives import CrowdLayer
from crowdnal.training import CrowdModel


class CCC(nn.Module):
    """Coupled Confusion Correction (Zhang et al. 2024).

    Two models, each a CrowdLayer ``h_n = p_i (W_r + V_g(r))``. After a warm-up of plain CrowdLayer, every epoch distils
    a class-balanced meta set for each model from the other one and groups its annotators by K-means of W. Every step
    finds the gradient for V of the meta loss after a virtual SGD step, takes
    ``V = -correction_rate max(W) / max|gradient| gradient``, makes the actual step with W + V, and drops V::

        ccc = crowdnal.CCC(attach(net_a, CrowdLayer(8, 59)), attach(net_b, CrowdLayer(8, 59)), num_groups=25)
        ccc.on_train_start(crowdnal.CrowdDataset(images, annotations))
        for epoch in range(200):
            ccc.on_epoch_start(epoch)
            ccc.train()
            for batch in loader:  # images and their annotations
                ccc.step(batch, optimizer_a, optimizer_b)
        ccc.eval(); probs = ccc.predict(images)

    The two networks should start from different weights. The meta gradient is exact and costs no second-order graph:
    see :mod:`crowdnal.ccc.meta_gradient`. Both models see the same batches; in the paper each runs through its own.
    Equations 6, 10 and 12 sum over an item's annotators and average over items, which is the models' CrowdLayer with
    ``reduction="per_item"``; the authors' code averages over annotations, as the default does, adds 1e-5 inside the
    logarithm of the loss, and on CIFAR-10 and Fashion-MNIST moves only the linear layer in the virtual step
    (``scope="head"``). Published settings, batches of 128: M = 1000, G = 30, SGD 0.01, 10 of 60 epochs of warm-up;
    LabelMe G = 25, Adam 1e-4, 50 of 200 epochs; Music M = 160, G = 20, correction rate 0.3, Adam 1e-2, 50 of 200
    epochs.

    In several processes (``torch.distributed``) each gives its own part of a batch to ``step``, which sums over them
    what a step needs: without ``DistributedDataParallel``. All call ``on_train_start`` with the whole data set, and
    begin with the first one's weights.

    Args:
        model_a: a network with ``CrowdLayer`` (MW, full rank, no shared matrices, K = C) attached.
        model_b: another, with parameters of its own.
        num_groups: G; fewer are used where annotators have fewer different matrices.
        correction_rate: gamma; 0 switches the correction off: two plain CrowdLayers.
        warmup_epochs: epochs of plain CrowdLayer before the first correction.
        meta_size: M, at least one item per class.
        meta_batch_size: items of a meta batch (all of a smaller meta set).
        scope: what the virtual step moves: ``"all"`` weights of the network, or its ``"head"``, the last linear layer.
        meta: for ``scope="all"``: ``"exact"`` (one forward-mode pass), ``"finite_difference"`` (one forward pass; two
            under autocast), or ``"auto"``: exact unless an op has no forward mode, which is said once.
        seed: of the K-means and the order of the meta batches.

    Attributes:
        groups: ``[2, R]`` the group of every annotator in each model, as of this epoch.
        meta_sets: ``meta_sets.sets``, rows and pseudo labels of each model's meta set.
        epoch: as of the last :meth:`on_epoch_start`.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    name: ClassVar[str] = "ccc"
    link: ClassVar[str] = "softmax(p (W_r + V_g)), V from a meta set that another network finds clean"
    source: ClassVar[str] = "Zhang et al. 2024"
    groups: Tensor

    def __init__(
        self,
        model_a: CrowdModel,
        model_b: CrowdModel,
        *,
        num_groups: int = 25,
        correction_rate: float = 0.5,
        warmup_epochs: int = 10,
        meta_size: int = 1000,
        meta_batch_size: int = 128,
        scope: Scope = "all",
        meta: Meta = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_models(model_a, model_b, scope)
        sizes = {"num_groups": (num_groups, 1), "warmup_epochs": (warmup_epochs, 0)}
        sizes |= {"meta_size": (meta_size, model_a.objective.num_classes), "meta_batch_size": (meta_batch_size, 1)}
        check_options(sizes, correction_rate, scope, meta)
        self.model_a, self.model_b = model_a, model_b
        for model in (model_a, model_b):
            assert isinstance(model.objective, CrowdLayer)
            model.objective.drop_prior()  # what V corrects is the paper's
        self.warmup_epochs, self.seed = warmup_epochs, seed
        self.meta_sets = MetaSets(meta_size, meta_batch_size)
        self.corrector = Corrector(num_groups, correction_rate, scope, meta)
        self.register_buffer("groups", torch.zeros(2, model_a.objective.num_annotators, dtype=torch.int64))
        self.epoch, self._steps = -1, 0

    @property
    def corrects(self) -> bool:
        """Whether the steps of this epoch correct the confusions."""
        return self.corrector.rate > 0 and self.epoch >= self.warmup_epochs

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[B, C]`` of both together: the logarithm of :meth:`predict`."""
        return self.together(*self.log_probabilities(images))

    def log_probabilities(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Of each model ``[B, C]``."""
        a, b = (at_least_float32(model(images)).log_softmax(-1) for model in (self.model_a, self.model_b))
        return a, b

    @staticmethod
    def together(a: Tensor, b: Tensor) -> Tensor:
        """The logarithm of half the sum of two probabilities, of their logarithms."""
        return torch.logaddexp(a, b) - math.log(2)

    def predict(self, images: Tensor) -> Tensor:
        """``[B, C]``: half the sum of both models' probabilities (call ``eval()`` first)."""
        return self(images).exp()

    def confusion(self) -> Tensor:
        """``[R, C, C]``, detached: mean of both models'."""
        return (self.model_a.objective.confusion() + self.model_b.objective.confusion()) / 2

    def on_train_start(
        self,
        dataset: CrowdDataset,
        *,
        evaluation: CrowdDataset | None = None,
        batch_size: int = 256,
        num_workers: int = 0,
    ) -> None:
        """Call once before training, also before it is resumed.

        Args:
            dataset: the training items and their annotations; meta batches come from it.
            evaluation: the same items without augmentation, for the distillation. Default: ``dataset``.
            batch_size: of the distillation's passes.
            num_workers: of the loaders of meta batches (one a model) and of the distillation.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        evaluation = dataset if evaluation is None else evaluation
        check_data(dataset, evaluation, self.model_a)
        from_first(self)
        self.meta_sets.use(*(Items(data, batch_size, num_workers) for data in (dataset, evaluation)))

    def on_epoch_start(self, epoch: int) -> None:
        """Call before epoch 0, 1, ... (a resumed run goes on with its number): after the warm-up distils and groups."""
        self.epoch, self._steps = epoch, 0
        self.meta_sets.restart()
        if not self.corrects:
            return
        models = self.model_a, self.model_b
        self.meta_sets.distill(models, self.groups.device)
        for k, model in enumerate(models):
            self.groups[k] = cluster_matrices(confusion_of(model), self.corrector.num_groups, self._seed_of(k))

    def step(
        self,
        batch: tuple[Tensor, Annotations | Tensor],
        optimizer_a: Optimizer,
        optimizer_b: Optimizer,
        scaler: Any = None,
    ) -> CCCOutput:
        """Train both models on a batch; gradients are cleared before.

        Inside ``torch.autocast`` the forward passes are in mixed precision, the rest is not. The virtual step uses the
        learning rates that the optimizers have now, so that any scheduler works.

        Args:
            batch: images and their annotations (or a dense ``[B, R]`` tensor), on the models' device.
            optimizer_a: of ``model_a.parameters()``, of any kind that needs no closure.
            optimizer_b: of ``model_b.parameters()``.
            scaler: a ``torch.amp.GradScaler`` for float16, updated once at the end.

        Raises:
            ValueError: an optimizer holds nothing of its model, or there is no meta set yet.
        """
        images, annotations = batch
        losses, corrections = [], []
        for k, (model, optimizer) in enumerate(((self.model_a, optimizer_a), (self.model_b, optimizer_b))):
            v = None
            if self.corrects:
                meta_batch = self.meta_sets.batch(k, self._seed_of(k), self._steps, images.device)
                loss, v = self.corrector.step(model, images, annotations, optimizer, scaler, meta_batch, self.groups[k])
            else:
                loss = plain_step(model, images, annotations, optimizer, scaler)
            losses.append(loss)
            corrections.append(v)
        if scaler is not None:
            scaler.update()
        self._steps += 1
        return CCCOutput(*losses, *corrections)

    def _seed_of(self, k: int) -> int:
        return (self.seed * 1_000_003 + self.epoch * 2 + k) % 2**32

    def extra_repr(self) -> str:
        """What it was made with."""
        c, sets = self.corrector, self.meta_sets
        return (
            f"num_groups={c.num_groups}, correction_rate={c.rate}, warmup_epochs={self.warmup_epochs}, "
            f"meta_size={sets.size}, meta_batch_size={sets.batch_size}, scope={c.scope!r}, meta={c.meta!r}, "
            f"seed={self.seed}"
        )

    def get_extra_state(self) -> dict[str, Any]:
        """Epoch, steps in it and meta sets: with parameters and groups all that a resumed run needs."""
        return {"epoch": self.epoch, "steps": self._steps, "meta_sets": self.meta_sets.sets}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """See :meth:`get_extra_state`."""
        self.epoch, self._steps = state["epoch"], state["steps"]
        self.meta_sets.sets = [(rows.cpu(), labels.cpu()) for rows, labels in state["meta_sets"]]
        self.meta_sets.restart()
