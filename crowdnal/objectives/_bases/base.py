"""What an objective is: a criterion with parameters that model how annotators label a true class."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, get_args

import torch
from torch import Tensor, nn

from crowdnal import metrics
from crowdnal.aggregation import posterior
from crowdnal.data import Annotations, as_annotations
from crowdnal.functional import Reduction

# logits [N, C] of the whole training set in its order, and features [N, D] where the objective needs them
Predict = Callable[[], tuple[Tensor, Tensor | None]]


class Objective(nn.Module):
    """Base of all objectives.

    A method implements ``_nll`` (or ``_loss`` and ``_log_likelihood``), ``confusion`` and what else of the
    following differs.
    ``loss``, ``log_likelihood`` and ``posterior`` check their input, switch autocast off and hand at least
    float32 logits and ``Annotations`` to the method, which never has to think about either.

    Args:
        num_classes: C, the true classes.
        num_annotators: R.
        num_labels: K, the labels annotators choose from; C where not given.
        reduction: ``"mean"`` over annotations (weighted), ``"sum"``, ``"item_mean"`` over items that have
            annotations of their mean, or ``"none"``: the data term of each annotation ``[nnz]``, to which
            :meth:`penalty` is not added. An empty batch has loss 0 and zero gradients.
    """

    name: ClassVar[str]
    needs_features: bool = False
    models_annotators: bool = True

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        num_labels: int | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        num_labels = num_classes if num_labels is None else num_labels
        sizes = {"num_classes": num_classes, "num_annotators": num_annotators, "num_labels": num_labels}
        for argument, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{argument}={size!r} must be a positive integer")
        if reduction not in get_args(Reduction):
            raise ValueError(f"reduction={reduction!r} is unknown: use one of {', '.join(get_args(Reduction))}")
        self.num_classes = num_classes
        self.num_annotators = num_annotators
        self.num_labels = num_labels
        self.reduction: Reduction = reduction

    def forward(self, logits: Tensor, annotations: Annotations | Tensor, features: Tensor | None = None) -> Tensor:
        """Same as :meth:`loss`."""
        return self.loss(logits, annotations, features)

    def loss(self, logits: Tensor, annotations: Annotations | Tensor, features: Tensor | None = None) -> Tensor:
        """The number to minimise.

        Args:
            logits: ``[B, C]`` of the classifier, any floating dtype; computed in at least float32.
            annotations: of the same B items, or a dense ``[B, R]`` tensor with -1 where there is no label.
            features: ``[B, D]``, only where ``needs_features``.

        Returns:
            Scalar, or ``[nnz]`` for ``reduction="none"``.
        """
        logits, annotations = self._inputs(logits, annotations, features)
        with torch.autocast(logits.device.type, enabled=False):
            loss = self._loss(logits, annotations, features)
            if self.reduction == "none" or annotations.num_annotations == 0:
                return loss
            penalty = self.penalty(annotations)
            return loss if penalty is None else loss + penalty.to(loss.dtype)

    @torch.no_grad()
    def log_likelihood(
        self, logits: Tensor, annotations: Annotations | Tensor, features: Tensor | None = None
    ) -> Tensor:
        """Log-probability ``[nnz]`` of each observed label under the model, unweighted and without penalty.

        On annotations that were held out of training its mean chooses an epoch without any clean label.
        """
        logits, annotations = self._inputs(logits, annotations, features)
        with torch.autocast(logits.device.type, enabled=False):
            return self._log_likelihood(logits, annotations, features)

    @torch.no_grad()
    def posterior(self, logits: Tensor, annotations: Annotations | Tensor, features: Tensor | None = None) -> Tensor:
        """``[B, C]`` over true classes given classifier and annotations; see :func:`crowdnal.posterior`."""
        logits, annotations = self._inputs(logits, annotations, features)
        with torch.autocast(logits.device.type, enabled=False):
            return self._posterior(logits, annotations, features)

    def predict(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Logits ``[B, C]`` of the true class: the classifier's own, unless the method predicts in a way of its own."""
        return logits

    @property
    def predicts(self) -> bool:
        """Whether :meth:`predict` is the method's own."""
        return type(self).predict is not Objective.predict

    def confusion(self) -> Tensor:
        """``[R, C, K]``, detached: row = true class, column = observed label, rows sum to 1."""
        raise NotImplementedError

    def reliability(self) -> Tensor:
        """``[R]``: :func:`crowdnal.metrics.reliability` of the confusions, balanced accuracy; 1 = always right."""
        return metrics.balanced_accuracy(self.confusion().diagonal(dim1=1, dim2=2), self.num_classes)

    def penalty(self, annotations: Annotations) -> Tensor | None:
        """Regulariser: a scalar that ``loss`` adds once to a reduced, non-empty batch; None = none."""
        return None

    def set_feature_dim(self, feature_dim: int) -> None:
        """Tells an objective with ``needs_features`` their length D, before its first batch.

        :func:`crowdnal.attach` does where the classifier is one linear layer. Parameters of that size are made here, or
        else by the first batch: too late for an optimizer or ``DistributedDataParallel`` that wants to see them.
        """

    def on_train_start(self, annotations: Annotations | None = None, predict: Predict | None = None) -> None:
        """Call once before training. Objectives with stored posteriors need both arguments, others neither.

        Args:
            annotations: of the whole training set; a batch's ``item_id`` are row numbers in it.
            predict: gives the current logits ``[N, C]`` and features of the whole training set, without
                gradients.
        """

    def on_train_resume(self, annotations: Annotations | None = None, predict: Predict | None = None) -> None:
        """Call instead of :meth:`on_train_start`, with the same, where training goes on from a loaded checkpoint."""

    def on_epoch_start(self, epoch: int) -> None:
        """Call before epoch 0, 1, ... (a resumed run goes on with its number)."""

    def on_epoch_end(self, epoch: int) -> None:
        """Call after every epoch."""

    def extra_repr(self) -> str:
        """What ``print(objective)`` adds."""
        labels = "" if self.num_labels == self.num_classes else f", num_labels={self.num_labels}"
        return (
            f"num_classes={self.num_classes}, num_annotators={self.num_annotators}{labels}, "
            f"reduction={self.reduction!r}"
        )

    def _loss(self, logits: Tensor, annotations: Annotations, features: Tensor | None) -> Tensor:
        return self._nll(logits, annotations, features, annotations.weight, self.reduction)

    def _log_likelihood(self, logits: Tensor, annotations: Annotations, features: Tensor | None) -> Tensor:
        ones = logits.new_ones(annotations.num_annotations)
        return -self._nll(logits, annotations, features, ones, "none")

    def _nll(
        self,
        logits: Tensor,
        annotations: Annotations,
        features: Tensor | None,
        weight: Tensor | None,
        reduction: Reduction,
    ) -> Tensor:
        """Negative log-likelihood of the labels, reduced with these weights ``[nnz]`` (None = 1)."""
        raise NotImplementedError

    def _posterior(self, logits: Tensor, annotations: Annotations, features: Tensor | None) -> Tensor:
        return posterior(logits.log_softmax(-1), self.confusion().to(logits.dtype), annotations)

    def _needs_square(self, what: str) -> None:
        if self.num_labels != self.num_classes:
            raise ValueError(
                f"num_labels={self.num_labels} differs from num_classes={self.num_classes}, which {what} "
                "cannot model: annotators must choose from the true classes here"
            )

    def _inputs(
        self, logits: Tensor, targets: Annotations | Tensor, features: Tensor | None
    ) -> tuple[Tensor, Annotations]:
        if logits.dim() != 2 or logits.shape[1] != self.num_classes or not logits.is_floating_point():
            raise ValueError(
                f"logits is {logits.dtype} {list(logits.shape)} but must be floating point [B, num_classes] "
                f"with num_classes={self.num_classes}: give the classifier one output for each true class"
            )
        annotations = as_annotations(targets, num_annotators=self.num_annotators, num_classes=self.num_labels)
        if annotations.num_items != logits.shape[0]:
            raise ValueError(
                f"logits has {logits.shape[0]} rows but annotations has {annotations.num_items} items: "
                "both must belong to the same batch, items without labels included"
            )
        if annotations.device != logits.device:
            raise ValueError(
                f"annotations are on {annotations.device} but logits on {logits.device}: use annotations.to(device)"
            )
        if self.needs_features and (features is None or features.shape[:1] != logits.shape[:1]):
            shape = None if features is None else list(features.shape)
            raise ValueError(
                f"features is {shape} but {type(self).__name__} needs [B={logits.shape[0]}, D]: pass the "
                "input of the classifier's last layer, or let crowdnal.attach do it"
            )
        dtype = torch.promote_types(logits.dtype, torch.float32)
        for parameter in self.parameters():
            dtype = torch.promote_types(dtype, parameter.dtype)
        return logits.to(dtype), annotations
