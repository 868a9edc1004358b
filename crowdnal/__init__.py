"""crowdnal: train classifiers on labels from many imperfect annotators.

Attach an objective to a timm backbone (`attach`), feed it `Annotations`, and the network learns the true label.
"""

from crowdnal import functional, metrics, objectives, simulation
from crowdnal.annotations import Annotations, Vocabulary, as_annotations, collate, concat
from crowdnal.attach import CrowdModel, CrowdOutput, attach
from crowdnal.callbacks import EMCallback
from crowdnal.conal_em import CoNALEMResult, conal_em
from crowdnal.datasets import CrowdDataset
from crowdnal.dawid_skene import DawidSkeneResult, dawid_skene
from crowdnal.objectives import (
    CoNAL,
    CoNALEM,
    CrowdLayer,
    DoctorNet,
    GeoCrowdNet,
    MajorityVote,
    MaxMIG,
    Objective,
    OverparametrizedCrowdLayer,
    SingleConfusion,
    SoftBootstrap,
    SoftMajorityVote,
    TraceRegularized,
    UnionNet,
    WeightedDoctorNet,
)
from crowdnal.ops import backend
from crowdnal.posterior import posterior

__version__ = "0.1.0"

__all__ = [
    "Annotations",
    "CoNAL",
    "CoNALEM",
    "CoNALEMResult",
    "CrowdDataset",
    "CrowdLayer",
    "CrowdModel",
    "CrowdOutput",
    "DawidSkeneResult",
    "DoctorNet",
    "EMCallback",
    "GeoCrowdNet",
    "MajorityVote",
    "MaxMIG",
    "Objective",
    "OverparametrizedCrowdLayer",
    "SingleConfusion",
    "SoftBootstrap",
    "SoftMajorityVote",
    "TraceRegularized",
    "UnionNet",
    "Vocabulary",
    "WeightedDoctorNet",
    "as_annotations",
    "attach",
    "backend",
    "collate",
    "conal_em",
    "concat",
    "dawid_skene",
    "functional",
    "metrics",
    "objectives",
    "posterior",
    "simulation",
]
