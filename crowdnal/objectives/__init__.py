"""Objectives: what attaches to a classifier so that it learns the true class from annotators' labels."""

from __future__ import annotations

import inspect
from typing import Any

from crowdnal.objectives._history import Round
from crowdnal.objectives._rounds import RoundsObjective
from crowdnal.objectives.base import Objective, Predict
from crowdnal.objectives.bootstrap import SoftBootstrap
from crowdnal.objectives.conal import CoNAL
from crowdnal.objectives.conal_em import CoNALEM
from crowdnal.objectives.crowd_layer import CrowdLayer
from crowdnal.objectives.doctor_net import DoctorNet
from crowdnal.objectives.geocrowdnet import GeoCrowdNet
from crowdnal.objectives.majority import MajorityVote, SoftMajorityVote
from crowdnal.objectives.max_mig import MaxMIG
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
    "OBJECTIVES",
    "CoNAL",
    "CoNALEM",
    "CrowdLayer",
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
]
