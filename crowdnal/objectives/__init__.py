"""Objectives: what attaches to a classifier so that it learns the true class from annotators' labels."""

from __future__ import annotations

import inspect
from typing import Any

from crowdnal.objectives._bases.base import Objective, Predict
from crowdnal.objectives._bases.history import Round
from crowdnal.objectives._bases.item_rows import item_rows, row_table
from crowdnal.objectives._bases.rounds import RoundsObjective
from crowdnal.objectives.bootstrap import SoftBootstrap
from crowdnal.objectives.cmm.objective import CMM
from crowdnal.objectives.conal.em import CoNALEM
from crowdnal.objectives.conal.objective import CoNAL
from crowdnal.objectives.crowd_layer import CrowdLayer
from crowdnal.objectives.dl_aggregate import DLAggregate
from crowdnal.objectives.dl_ds import DLDS
from crowdnal.objectives.dl_em import DLEM
from crowdnal.objectives.dl_wc import DLWC
from crowdnal.objectives.doctor_net import DoctorNet
from crowdnal.objectives.geocrowdnet import GeoCrowdNet
from crowdnal.objectives.lia.multilabel import LIAML
from crowdnal.objectives.lia.objective import LIA
from crowdnal.objectives.majority import MajorityVote, SoftMajorityVote
from crowdnal.objectives.max_mig import MaxMIG
from crowdnal.objectives.mbem import MBEM
from crowdnal.objectives.overparametrized import OverparametrizedCrowdLayer
from crowdnal.objectives.single_confusion import SingleConfusion
from crowdnal.objectives.trace import TraceRegularized
from crowdnal.objectives.union_net import UnionNet
from crowdnal.objectives.weighted_doctor_net import WeightedDoctorNet

OBJECTIVES: dict[str, type[Objective]] = {
    cls.name: cls
    for cls in (
        MajorityVote,
        SoftMajorityVote,
        SoftBootstrap,
        CrowdLayer,
        OverparametrizedCrowdLayer,
        TraceRegularized,
        SingleConfusion,
        GeoCrowdNet,
        CoNAL,
        CoNALEM,
        UnionNet,
        MaxMIG,
        DoctorNet,
        WeightedDoctorNet,
        LIA,
        CMM,
        DLEM,
        DLDS,
        MBEM,
        DLWC,
        DLAggregate,
    )
}


def create(name: str, **kwargs: Any) -> Objective:
    """The objective registered as ``name`` (a key of ``OBJECTIVES``), made with ``kwargs``.

    Raises:
        ValueError: unknown name, or an option that this objective does not have.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"objective {name!r} is unknown: use one of {', '.join(OBJECTIVES)}")
    cls = OBJECTIVES[name]
    options = [option for option in inspect.signature(cls).parameters]
    for option in kwargs:
        if option not in options:
            raise ValueError(f"objective {name!r} has no option {option!r}: it takes {', '.join(options)}")
    return cls(**kwargs)


__all__ = [
    "LIA",
    "LIAML",
    "CMM",
    "DLDS",
    "DLEM",
    "DLWC",
    "MBEM",
    "OBJECTIVES",
    "CoNAL",
    "CoNALEM",
    "CrowdLayer",
    "DLAggregate",
    "DoctorNet",
    "GeoCrowdNet",
    "MajorityVote",
    "MaxMIG",
    "Objective",
    "OverparametrizedCrowdLayer",
    "Predict",
    "Round",
    "RoundsObjective",
    "SingleConfusion",
    "SoftBootstrap",
    "SoftMajorityVote",
    "TraceRegularized",
    "UnionNet",
    "WeightedDoctorNet",
    "create",
    "item_rows",
    "row_table",
]
