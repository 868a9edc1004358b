"""crowdnal: train classifiers on labels from many imperfect annotators.

Attach an objective to a timm backbone (`attach`), feed it `Annotations`, and the network learns the true label.
"""

from crowdnal import functional, metrics, multilabel, objectives, simulation
from crowdnal.aggregation import aggregate
from crowdnal.annotations import Annotations, Vocabulary, as_annotations, collate, concat
from crowdnal.attach import CrowdModel, CrowdOutput, attach
from crowdnal.callbacks import EMCallback
from crowdnal.ccc import CCC, CCCOutput
from crowdnal.conal_em import CoNALEMResult, conal_em
from crowdnal.datasets import CrowdDataset
from crowdnal.dawid_skene import DawidSkeneResult, dawid_skene
from crowdnal.mmce import MMCEResult, mmce
from crowdnal.objectives import (
    CMM,
    DLDS,
    DLEM,
    DLWC,
    LIA,
    LIAML,
    MBEM,
    CoNAL,
    CoNALEM,
    CrowdLayer,
    DLAggregate,
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
from crowdnal.one_coin import one_coin
from crowdnal.ops import backend
from crowdnal.posterior import posterior
from crowdnal.restarts import Restarts, best_of_restarts
from crowdnal.worker_clustering import WorkerClusteringResult, worker_clustering

__version__ = "0.1.0"

__all__ = [
    "LIA",
    "LIAML",
    "CMM",
    "DLDS",
    "DLEM",
    "DLWC",
    "MBEM",
    "CCC",
    "Annotations",
    "CCCOutput",
    "CoNAL",
    "CoNALEM",
    "CoNALEMResult",
    "CrowdDataset",
    "CrowdLayer",
    "CrowdModel",
    "CrowdOutput",
    "DLAggregate",
    "DawidSkeneResult",
    "DoctorNet",
    "EMCallback",
    "GeoCrowdNet",
    "MMCEResult",
    "MajorityVote",
    "MaxMIG",
    "Objective",
    "OverparametrizedCrowdLayer",
    "Restarts",
    "SingleConfusion",
    "SoftBootstrap",
    "SoftMajorityVote",
    "TraceRegularized",
    "UnionNet",
    "Vocabulary",
    "WeightedDoctorNet",
    "WorkerClusteringResult",
    "aggregate",
    "as_annotations",
    "attach",
    "backend",
    "best_of_restarts",
    "collate",
    "conal_em",
    "concat",
    "dawid_skene",
    "functional",
    "metrics",
    "multilabel",
    "mmce",
    "objectives",
    "one_coin",
    "posterior",
    "simulation",
    "worker_clustering",
]
