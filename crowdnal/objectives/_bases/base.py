"""What an objective is: a criterion with parameters that model how annotators label a true class.

A method is one file with a class that ``@register`` names::

    @register("my-method", link="softmax(p W_r)", source="Author 2026")
    class MyMethod(SoftmaxObjective):
        '''Cross-entropy of each label, plus ``strength`` times ... (and ``Args:``, with ``strength``).'''

        def __init__(
            self, num_classes: int, num_annotators: int, *, strength: float = 0.1, **common: Unpack[ConfusionOptions]
        ) -> None:
            super().__init__(num_classes, num_annotators, **common)
            check_amount(strength=strength)
            self.strength = strength
            self.annotators = self.free_matrices()

        @override
        def penalty(self, annotations: Annotations) -> Tensor:
            return self.strength * self.annotators.weight.square().sum()

An option is named, documented and given its default once, in the class that takes it; a subclass hands on those of its
base with ``**common``, typed by the ``TypedDict`` above the base (one that changes a default names that option itself).
``inspect.signature``, ``help`` and ``--option`` show them all: `Objective.__init_subclass__` sees to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypedDict

import torch
from torch import Tensor, nn

from crowdnal import metrics
from crowdnal._utils.options import check_choice, check_integer, check_types
from crowdnal.aggregation import posterior
from crowdnal.data import Annotations, as_annotations, as_gold
from crowdnal.functional import Reduction
from crowdnal.functional.reduction import reduce
from crowdnal.objectives._bases.batch import Batch
from crowdnal.objectives._bases.cross_entropy import (
    NAMES,
    ClassWeight,
    CrossEntropy,
    CrossEntropyOptions,
    Target,
    check_shape_of_terms,
    checked_class_weight,
)
from crowdnal.objectives._bases.known import KnownClasses
from crowdnal.objectives._bases.signature import full_doc, full_signature
from crowdnal.objectives._bases.targets import labelled
from crowdnal.objectives._bases.updates import watch

# logits [N, C] of the whole training set in its order, and features [N, D] where the objective needs them
Predict = Callable[[], tuple[Tensor, Tensor | None]]


class SizeOptions(TypedDict, total=False):
    """Those of every :class:`Objective`."""

    num_labels: int | None
    reduction: Reduction


class ObjectiveOptions(SizeOptions, CrossEntropyOptions, total=False):
    """Those of an :class:`Objective` whose loss is a cross-entropy."""


class Objective(nn.Module):
    """Base of all objectives.

    A method implements ``_nll`` (or ``_loss`` and ``_log_likelihood``), ``confusion`` and what else of the
    following differs.
    ``loss``, ``log_likelihood`` and ``posterior`` check their input, switch autocast off and hand the method a
    ``Batch``: at least float32 logits and ``Annotations``, so that it never has to think about either.

    Args:
        num_classes: C, the true classes.
        num_annotators: R.
        num_labels: K, the labels annotators choose from; C where not given.
        reduction: ``"mean"`` over annotations (weighted), ``"sum"``, over items that have annotations of their mean
            (``"item_mean"``) or their sum (``"per_item"``, the 1/N Σ_i Σ_r of the papers' formulas, beside which a
            penalty weighs less by the labels of an item), or ``"none"``: the data term of each annotation ``[nnz]``, to
            which :meth:`penalty` is not added. An empty batch has loss 0 and zero gradients.
        class_weight: ``[K]`` what a label of each class counts, 0 or more, times the weight of the annotation; where
            the loss is a cross-entropy with targets by item ``[C]``, what the classes count in them. A mean is divided
            by these weights too.
        label_smoothing: ε in [0, 1): a label (a target) is 1 - ε of itself and ε spread over all K (C).
        focal: γ, 0 or more: what has probability p counts ``(1 - p)^γ``, so that what is easy counts less.
    """

    name: ClassVar[str]
    link: ClassVar[str]
    source: ClassVar[str]
    __signature__: ClassVar[inspect.Signature]
    made_with: dict[str, Any]
    class_weight: Tensor | None
    needs_features: bool = False
    models_annotators: bool = True
    counts_items: ClassVar[bool] = False
    """Whether ``reduction="mean"`` is over items and not over annotations."""
    holds_known: ClassVar[bool] = False
    """Whether the targets are those of :meth:`set_gold` where they are known, so that the loss adds nothing."""
    found_of_annotators: ClassVar[tuple[str, ...]] = ()
    """Buffers that get a row per annotator in training: those who come later get the mean of the others."""
    cross_entropy_with: Target = "labels"
    """Whether class weights, smoothing and focal terms are of each label's likelihood, of the classifier's
    cross-entropy with targets by item (``self.cross_entropy.of_targets``), or have no meaning and are refused."""
    parts: ClassVar[tuple[type, ...]] = ()
    """Classes, other than the base, to which the constructor hands options on."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuses options of a wrong type by name, before a constructor runs into them; notes what it is made with."""
        parameters = inspect.signature(cls).parameters
        if cls.cross_entropy_with is None and (refused := [name for name in NAMES if kwargs.get(name) is not None]):
            raise ValueError(
                f"{refused[0]} has no meaning for {cls.__name__}, whose loss is no cross-entropy of single labels: "
                "give the annotations weights (Annotations(weight=...)) instead"
            )
        check_types(parameters, {**dict(zip(parameters, args, strict=False)), **kwargs})
        new = super().__new__(cls)
        try:
            given = cls.__signature__.bind(*args, **kwargs).arguments
        except (AttributeError, TypeError):  # what does not fit is the constructor's to say; a copy brings its own
            given = {}
        object.__setattr__(new, "made_with", dict(given))  # one like it can be made for another crowd
        return new

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        num_labels: int | None = None, reduction: Reduction = "mean", class_weight: ClassWeight | None = None,
        label_smoothing: float = 0.0, focal: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        num_labels = num_classes if num_labels is None else num_labels
        check_integer(1, num_classes=num_classes, num_annotators=num_annotators, num_labels=num_labels)
        check_choice(Reduction, reduction=reduction)
        self.num_classes = num_classes
        self.num_annotators = num_annotators
        self.num_labels = num_labels
        self.reduction: Reduction = reduction
        check_shape_of_terms(label_smoothing, focal)
        self.label_smoothing, self.focal = label_smoothing, focal
        of = {"num_labels": num_labels} if self.cross_entropy_with == "labels" else {"num_classes": num_classes}
        self.register_buffer("class_weight", checked_class_weight(class_weight, **of), persistent=False)
        self.known: KnownClasses | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__signature__ = full_signature(cls, cls.parts)
        cls.__doc__ = full_doc(cls)

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
        batch = self.as_batch(logits, annotations, features)
        if self.cross_entropy_with == "labels":
            batch = batch.of(self.cross_entropy.by_label(batch.annotations))
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            watch(self)
        with torch.autocast(batch.logits.device.type, enabled=False):
            loss = self._loss(batch)
            if self.reduction == "none":
                return loss
            if self.known is not None and not self.holds_known:
                units = self._units(batch.annotations)
                weight = self.cross_entropy.of_classes(self.num_classes, batch.logits.dtype)
                loss = self.known.join(loss, units, batch.logits, batch.annotations, self.reduction, weight)
            penalty = self.penalty(batch.annotations) if batch.annotations.num_annotations > 0 else None
            return loss if penalty is None else loss + penalty.to(loss.dtype)

    @torch.no_grad()
    def log_likelihood(
        self, logits: Tensor, annotations: Annotations | Tensor, features: Tensor | None = None
    ) -> Tensor:
        """Log-probability ``[nnz]`` of each observed label under the model, unweighted and without penalty.

        On annotations that were held out of training its mean chooses an epoch without any clean label.
        """
        batch = self.as_batch(logits, annotations, features)
        with torch.autocast(batch.logits.device.type, enabled=False):
            return self._log_likelihood(batch)

    @torch.no_grad()
    def posterior(self, logits: Tensor, annotations: Annotations | Tensor, features: Tensor | None = None) -> Tensor:
        """``[B, C]`` over true classes given classifier and annotations; see :func:`crowdnal.posterior`."""
        batch = self.as_batch(logits, annotations, features)
        with torch.autocast(batch.logits.device.type, enabled=False):
            posterior = self._posterior(batch)
            return posterior if self.known is None else self.known.correct(posterior, batch.annotations)

    def set_gold(self, gold: Any, annotations: Annotations | None = None, *, weight: float = 1.0) -> None:
        """True classes of some items, beside the annotators' labels: from now on the loss and the posterior know them.

        A known class counts like ``weight`` labels by somebody who is always right: a mean is over labels, or items,
        and known classes. Of a batch's items those are known whose ``item_id`` are; ``reduction="none"`` leaves them
        out.
        Objectives that estimate confusions in closed form hold them in every step of EM, and there ``weight`` is 1.

        Args:
            gold: of the training set, as :func:`crowdnal.data.as_gold` takes it; None forgets what was known.
            annotations: of the training set, for gold by item id or class id.
            weight: above 0.
        """
        if not 0 < weight < float("inf"):
            raise ValueError(f"weight={weight!r} must be above 0: the labels that a known class counts")
        self.known = (
            None if gold is None else KnownClasses(as_gold(gold, annotations, self.num_classes), weight, annotations)
        )

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

    def units(self, annotations: Annotations) -> Tensor:
        """Scalar: how many labels (their weight) or items a mean is over; see :func:`crowdnal.batch_shares`."""
        counted = self.cross_entropy.by_label(annotations) if self.cross_entropy_with == "labels" else annotations
        units = self._units(counted)
        if self.known is None or self.holds_known:
            return units
        return units + self.known.units(annotations, self.cross_entropy.of_classes(self.num_classes, torch.float32))

    def _units(self, annotations: Annotations) -> Tensor:
        if self.reduction in ("item_mean", "per_item") or self.counts_items:
            return labelled(annotations).sum()
        return annotations.indptr[-1] if annotations.weight is None else annotations.weight.sum()

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
        """What ``print(objective)`` adds: sizes, reduction, and every word or number that is not the default."""
        sizes = {"num_classes": self.num_classes, "num_annotators": self.num_annotators}
        sizes |= {"num_labels": self.num_labels} if self.num_labels != self.num_classes else {}
        shown: dict[str, object] = {**sizes, "reduction": self.reduction}
        for name, option in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name, None)
            own = name not in (*shown, "num_labels", "training")  # torch's training is no option
            if own and isinstance(value, (bool, int, float, str)) and value != option.default:
                shown[name] = value
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any,
        errors: list[str],
    ) -> None:  # fmt: skip
        for name, own in [*self.named_parameters(), *self.named_buffers()]:
            given = state_dict.get(prefix + name)
            if not isinstance(given, Tensor) or nn.parameter.is_lazy(own) or nn.parameter.is_lazy(given):
                continue
            sizes = given.shape[:1], own.shape[:1]
            if own.shape[:1] == (self.num_annotators,) and sizes[0] != sizes[1] and given.shape[1:] == own.shape[1:]:
                errors.append(
                    f"the state is of {len(given)} annotators and {type(self).__name__} was made for "
                    f"{self.num_annotators}: crowdnal.load_annotators(model, state, annotators=, known=) matches them "
                    "by id"
                )
                break
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    # For methods

    @property
    def cross_entropy(self) -> CrossEntropy:
        """What labels count in it: class weights, smoothing, focal terms."""
        return CrossEntropy(self.class_weight, self.label_smoothing, self.focal)

    def _loss(self, batch: Batch) -> Tensor:
        cross_entropy, annotations = self.cross_entropy, batch.annotations
        if cross_entropy.plain:
            return self._nll(batch)
        if cross_entropy.label_smoothing > 0:
            terms = cross_entropy.of_labels(self._label_log_probs(batch), annotations.label)
        else:
            terms = cross_entropy.focused(-self._nll(batch.each()))
        return reduce(terms, annotations, batch.weight, batch.reduction)

    def _label_log_probs(self, batch: Batch) -> Tensor:
        """``[nnz, K]``: the log-probability of every label that an annotator might have given."""
        every = batch.annotations.every_label(self.num_labels)
        return -self._nll(batch.of(every).each()).view(-1, self.num_labels)

    def _log_likelihood(self, batch: Batch) -> Tensor:
        return -self._nll(batch.each())

    def _nll(self, batch: Batch) -> Tensor:
        """Negative log-likelihood of the labels, with the batch's weights and reduction."""
        raise NotImplementedError

    def _posterior(self, batch: Batch) -> Tensor:
        return posterior(batch.logits.log_softmax(-1), self.confusion().to(batch.logits.dtype), batch.annotations)

    def require_square(self, what: str) -> None:
        """A ValueError where annotators choose from other labels than the true classes, which ``what`` cannot model."""
        if self.num_labels != self.num_classes:
            fix = "annotators must choose from the true classes here"
            if self.num_labels > self.num_classes:
                fix = (
                    "leave out num_labels and give it crowdnal.data.of_classes(annotations, num_classes), without the "
                    "answers that are no class (crowdnal train: name them with --missing instead of --unsure)"
                )
            raise ValueError(
                f"num_labels={self.num_labels} differs from num_classes={self.num_classes}, which {what} "
                f"cannot model: {fix}"
            )

    def require_a_label_per_class(self, what: str) -> None:
        """A ValueError where annotators have fewer labels than there are classes, so that votes are for none of them.

        More labels are legal: those behind the classes are answers such as "unsure".
        """
        if self.num_labels < self.num_classes:
            self.require_square(what)

    def as_batch(self, logits: Tensor, annotations: Annotations | Tensor, features: Tensor | None = None) -> Batch:
        """The arguments of :meth:`loss`, checked, as methods take them.

        Raises:
            ValueError: naming the argument that does not fit the objective or the others.
        """
        if logits.dim() != 2 or logits.shape[1] != self.num_classes or not logits.is_floating_point():
            raise ValueError(
                f"logits is {logits.dtype} {list(logits.shape)} but must be floating point [B, num_classes] "
                f"with num_classes={self.num_classes}: give the classifier one output for each true class"
            )
        annotations = as_annotations(annotations, num_annotators=self.num_annotators, num_classes=self.num_labels)
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
        return Batch(logits.to(dtype), annotations, features, annotations.weight, self.reduction)


Objective.__signature__ = full_signature(Objective)  # else that of __new__ is shown
