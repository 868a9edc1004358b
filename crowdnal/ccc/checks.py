"""What CCC accepts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from crowdnal.ccc.step import Meta, Scope, head_of
from crowdnal.confusion import FreeConfusion
from crowdnal.data import CrowdDataset
from crowdnal.objectives import CrowdLayer
from crowdnal.training import CrowdModel


def check_models(model_a: Any, model_b: Any, scope: str) -> None:
    """Two separate networks with the same kind of CrowdLayer.

    Raises:
        TypeError: one is no CrowdModel.
        ValueError: one has another objective or no linear layer, or the two do not fit.
    """
    for name, model in (("model_a", model_a), ("model_b", model_b)):
        if not isinstance(model, CrowdModel):
            raise TypeError(
                f"{name} is {type(model).__name__} but must be a network with a CrowdLayer: "
                "crowdnal.attach(network, crowdnal.CrowdLayer(num_classes, num_annotators))"
            )
        objective = model.objective
        if not isinstance(objective, CrowdLayer):
            raise ValueError(f"{name} has the objective {type(objective).__name__}: CCC corrects those of CrowdLayer")
        if not isinstance(objective.annotators, FreeConfusion) or objective.groups is not None or objective.sparse_grad:
            raise ValueError(
                f"{name} has CrowdLayer(variant={objective.variant!r}, rank={objective.rank}, groups="
                f"{'None' if objective.groups is None else '...'}, sparse_grad={objective.sparse_grad}): CCC needs "
                "variant='MW' with a full matrix per annotator and dense gradients"
            )
        if objective.reduction == "none":
            raise ValueError(f"{name} has reduction='none': a step needs one number, use 'mean'")
        if objective.class_weight is not None or not objective.cross_entropy.plain:
            raise ValueError(
                f"{name} has class weights, label_smoothing or focal terms, which CCC's corrected steps do not know: "
                "leave them out, or give the annotations weights"
            )
        objective.require_square("CCC, whose meta sets take labels for classes,")
        if scope == "head" and not head_of(model):
            raise ValueError(f"{name} has no linear layer, so that scope='head' moves nothing: use scope='all'")
    a, b = model_a.objective, model_b.objective
    if (a.num_classes, a.num_annotators) != (b.num_classes, b.num_annotators):
        raise ValueError(
            f"model_a has {a.num_classes} classes and {a.num_annotators} annotators, model_b {b.num_classes} and "
            f"{b.num_annotators}: both must be made for the same annotations"
        )
    if {id(p) for p in model_a.parameters()} & {id(p) for p in model_b.parameters()}:
        raise ValueError("model_b shares parameters with model_a: make two networks, from different random inits")


def check_options(sizes: Mapping[str, tuple[Any, int]], rate: Any, scope: Any, meta: Any) -> None:
    """Integers ``(value, least)`` by name, and the options.

    Raises:
        ValueError: naming the argument.
    """
    for name, (size, least) in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < least:
            raise ValueError(f"{name}={size!r} must be an integer, {least} or more")
    if not 0 <= rate < float("inf"):
        raise ValueError(f"correction_rate={rate!r} must be finite and 0 or more (0.5 in the paper)")
    for name, value, known in (("scope", scope, get_args(Scope)), ("meta", meta, get_args(Meta))):
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown: use one of {', '.join(known)}")


def check_data(dataset: Any, evaluation: Any, model: CrowdModel) -> None:
    """Data sets of the same items, with annotations for which the model was made.

    Raises:
        TypeError: one is no CrowdDataset.
        ValueError: naming what differs.
    """
    for name, data in (("dataset", dataset), ("evaluation", evaluation)):
        if not isinstance(data, CrowdDataset):
            raise TypeError(f"{name} is {type(data).__name__} but must be a crowdnal.CrowdDataset(images, annotations)")
    annotations, objective = dataset.annotations, model.objective
    found, made_for = ((sizes.num_classes, sizes.num_annotators) for sizes in (annotations, objective))
    if found != made_for:
        raise ValueError(
            f"dataset has annotations of {found[0]} classes by {found[1]} annotators, the models were made for "
            f"{made_for[0]} and {made_for[1]}: read them with classes= and annotators="
        )
    if len(evaluation) != len(dataset):
        raise ValueError(
            f"evaluation has {len(evaluation)} items and dataset {len(dataset)}: both must be the same items in the "
            "same order"
        )
