"""Hugging Face transformers: a Trainer that trains any objective on sequences or tokens, and its collator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, default_data_collator

from crowdnal.data import Annotations, collate, concat
from crowdnal.objectives import Objective
from crowdnal.training import CrowdModel, ObjectiveCallback, attach, param_groups


class LogitsAndFeatures(nn.Module):
    """A classifier of transformers as ``(logits, features)``: the last hidden state, of sequences that of token 0."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, C]`` and ``[B, D]``, or of tokens ``[B, T, C]`` and ``[B, T, D]``."""
        output = self.model(**inputs, output_hidden_states=True)
        hidden = output.hidden_states[-1]
        return output.logits, hidden if output.logits.dim() == 3 else hidden[:, 0]


def attach_transformer(model: nn.Module, objective: Objective) -> CrowdModel:
    """:func:`crowdnal.attach` for a model of transformers, with its features where the objective needs them."""
    if not objective.needs_features:
        return attach(model, objective)
    objective.set_feature_dim(int(model.config.hidden_size))  # type: ignore[union-attr, arg-type]
    return attach(LogitsAndFeatures(model), objective)


class CrowdCollator:
    """Batches of samples with ``annotations``: one item a sequence, or one a token.

    Args:
        collator: of the rest of a sample; ``DataCollatorWithPadding(tokenizer)``, say.
        tokens: the annotations of a sample are of its tokens, which are padded as ``input_ids`` are.
    """

    def __init__(self, collator: Callable[[list[Any]], Any] = default_data_collator, *, tokens: bool = False) -> None:
        self.collator, self.tokens = collator, tokens

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """The batch, with ``annotations``."""
        given = [sample["annotations"] for sample in samples]
        rest = [{key: value for key, value in sample.items() if key != "annotations"} for sample in samples]
        batch = dict(self.collator(rest))
        if self.tokens:
            length = batch["input_ids"].shape[1]
            given = [padded(annotations, length) for annotations in given]
        return {**batch, "annotations": collate(given)}


def padded(annotations: Annotations, length: int) -> Annotations:
    """With items without labels behind, to ``length`` of them."""
    if len(annotations) > length:
        raise ValueError(f"a sample has annotations of {len(annotations)} tokens but {length} tokens: cut both alike")
    none = Annotations(
        [0] * (length - len(annotations) + 1),
        [],
        [],
        num_annotators=annotations.num_annotators,
        num_classes=annotations.num_classes,
    )
    return concat([annotations, none])


class CrowdTrainer(Trainer):
    """Trains a CrowdModel; batches hold ``annotations``, and for evaluation true ``labels`` if you like.

    Args:
        args: as of ``Trainer``, like all that follows; give ``TrainingArguments(remove_unused_columns=False)``.
            The objective is neither decayed nor trained at ``learning_rate``.
        objective_lr: default ``learning_rate``.
        loader: for EM-style objectives, as of :class:`crowdnal.ObjectiveCallback`: of ``(inputs, annotations)``.
    """

    optimizer: Any

    def __init__(
        self, *args: Any, objective_lr: float | None = None, loader: Iterable[Any] | None = None, **kwargs: Any
    ) -> None:
        kwargs.setdefault("data_collator", CrowdCollator())
        super().__init__(*args, **kwargs)
        self.objective_lr = objective_lr
        if self.args.remove_unused_columns:
            raise ValueError("remove_unused_columns=True drops the annotations: set it to False in TrainingArguments")
        self.model_accepts_loss_kwargs = False  # the loss is a mean over this batch's annotations
        if loader is not None:
            self.add_callback(_Hooks(ObjectiveCallback(self.model, loader)))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """``args``' optimizer on the groups of :func:`crowdnal.param_groups`."""
        if self.optimizer is None:
            of = self.model if model is None else model
            make, options = self.get_optimizer_cls_and_kwargs(self.args, of)
            rate = self.args.learning_rate
            groups = param_groups(of, rate, self.args.weight_decay, objective_lr=self.objective_lr)
            self.optimizer = make(groups, **options)
        return self.optimizer

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        """Of the annotations; true labels are not looked at."""
        given = {key: value for key, value in inputs.items() if key not in ("annotations", "labels")}
        output = model(given, inputs["annotations"].to(next(iter(given.values())).device))
        return (output.loss, output) if return_outputs else output.loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Loss of the annotations, logits, and the true labels (what gathers them takes tensors alone)."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            if inputs.get("annotations") is not None:
                loss, output = self.compute_loss(model, inputs, return_outputs=True)
                logits = output.logits
            else:
                loss, logits = None, model({key: value for key, value in inputs.items() if key != "labels"})
        labels = inputs.get("labels")
        if prediction_loss_only:
            return loss, None, None
        return loss, logits.detach(), logits.argmax(-1) if labels is None else labels


class _Hooks(TrainerCallback):
    def __init__(self, callback: ObjectiveCallback) -> None:
        self.callback = callback

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.callback.on_epoch_start(round(state.epoch or 0))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.callback.on_epoch_end(round(state.epoch or 0) - 1)


__all__ = ["CrowdCollator", "CrowdTrainer", "LogitsAndFeatures", "attach_transformer", "padded"]
