"""Objectives: what attaches to a classifier so that it learns the true class from annotators' labels.

Every method is one file of this package (or of another one) that ``register`` names; ``OBJECTIVES`` finds it.
"""

from __future__ import annotations

from crowdnal.objectives._bases.base import Objective, ObjectiveOptions, Predict, SizeOptions
from crowdnal.objectives._bases.batch import Batch
from crowdnal.objectives._bases.closed_form import ClosedFormObjective
from crowdnal.objectives._bases.confusions import (
    ConfusionObjective,
    ConfusionOptions,
    MixtureObjective,
    SoftmaxObjective,
)
from crowdnal.objectives._bases.history import Round
from crowdnal.objectives._bases.item_rows import GIVE, ItemNumbers, item_rows, row_table
from crowdnal.objectives._bases.rounds import RoundsObjective, RoundsOptions
from crowdnal.objectives._changing import Matched, load_annotators, with_annotators
from crowdnal.objectives._registry import OBJECTIVES, create, discover, register, table
from crowdnal.objectives.methods import *  # noqa: F403

discover(__name__)
CLASSES = tuple(name for name, value in list(globals().items()) if isinstance(value, type) and "name" in vars(value))
"""Names of the classes of this package's methods."""

__all__ = [
    "GIVE",
    "OBJECTIVES",
    "Batch",
    "ClosedFormObjective",
    "ConfusionObjective",
    "ConfusionOptions",
    "ItemNumbers",
    "Matched",
    "MixtureObjective",
    "Objective",
    "ObjectiveOptions",
    "Predict",
    "Round",
    "RoundsObjective",
    "RoundsOptions",
    "SizeOptions",
    "SoftmaxObjective",
    "create",
    "item_rows",
    "load_annotators",
    "register",
    "row_table",
    "table",
    "with_annotators",
]
