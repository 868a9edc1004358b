"""crowdnal: train classifiers on labels from many imperfect annotators.

Attach an objective to a timm backbone (`attach`), feed it `Annotations`, and the network learns the true label.
The words used here (annotator, item, class and label, confusion, link, reliability) are defined in docs/concepts.md.
"""

from crowdnal import functional, metrics, multilabel, objectives, simulation
from crowdnal.aggregation import (
    BCCResult,
    BWAResult,
    CoNALEMResult,
    DawidSkeneResult,
    FeatureEMResult,
    MMCEResult,
    WorkerClusteringResult,
    aggregate,
    bwa,
    cbcc,
    conal_em,
    dawid_skene,
    ebcc,
    feature_em,
    ibcc,
    mmce,
    one_coin,
    posterior,
    worker_clustering,
)
from crowdnal.ccc import CCC, CCCOutput
from crowdnal.data import Annotations, CrowdDataset, Vocabulary, as_annotations, collate, concat
from crowdnal.objectives import Objective, load_annotators, with_annotators
from crowdnal.objectives.methods import *  # noqa: F403
from crowdnal.ops import backend
from crowdnal.training import (
    Comparison,
    CrossFit,
    CrowdModel,
    CrowdOutput,
    EMCallback,
    ObjectiveCallback,
    Restarts,
    attach,
    batch_shares,
    best_of_restarts,
    compare,
    param_groups,
)

__version__ = "0.1.0"

__all__ = [
    *objectives.CLASSES,
    "CCC",
    "Annotations",
    "BCCResult",
    "BWAResult",
    "CCCOutput",
    "CoNALEMResult",
    "Comparison",
    "CrossFit",
    "CrowdDataset",
    "CrowdModel",
    "CrowdOutput",
    "DawidSkeneResult",
    "EMCallback",
    "FeatureEMResult",
    "MMCEResult",
    "Objective",
    "ObjectiveCallback",
    "Restarts",
    "Vocabulary",
    "WorkerClusteringResult",
    "aggregate",
    "as_annotations",
    "attach",
    "backend",
    "batch_shares",
    "best_of_restarts",
    "bwa",
    "cbcc",
    "collate",
    "conal_em",
    "compare",
    "concat",
    "dawid_skene",
    "ebcc",
    "feature_em",
    "functional",
    "ibcc",
    "load_annotators",
    "metrics",
    "multilabel",
    "mmce",
    "objectives",
    "one_coin",
    "param_groups",
    "posterior",
    "simulation",
    "with_annotators",
    "worker_clustering",
]
