"""The true labels from annotations alone: aggregation, and the E-steps and votes that objectives share with it."""

from crowdnal.aggregation._conal_em import CoNALEMResult, Omega, State, conal_em
from crowdnal.aggregation._dawid_skene import dawid_skene
from crowdnal.aggregation._em import (
    FLOOR,
    DawidSkeneResult,
    check_gold,
    check_prior,
    check_smoothing,
    classes_of,
    log_shares,
    possible,
    pseudo_counts_of,
)
from crowdnal.aggregation._external import AGGREGATORS, aggregate, check_method
from crowdnal.aggregation._mmce import MMCEResult, mmce
from crowdnal.aggregation._one_coin import one_coin
from crowdnal.aggregation._posterior import posterior, posterior_of_log_likelihood
from crowdnal.aggregation._votes import vote_log_confusion, vote_proportions
from crowdnal.aggregation._worker_clustering import WorkerClusteringResult, worker_clustering

__all__ = [
    "AGGREGATORS",
    "FLOOR",
    "CoNALEMResult",
    "DawidSkeneResult",
    "MMCEResult",
    "Omega",
    "State",
    "WorkerClusteringResult",
    "aggregate",
    "check_gold",
    "check_method",
    "check_prior",
    "check_smoothing",
    "classes_of",
    "conal_em",
    "dawid_skene",
    "log_shares",
    "mmce",
    "one_coin",
    "possible",
    "posterior",
    "posterior_of_log_likelihood",
    "pseudo_counts_of",
    "vote_log_confusion",
    "vote_proportions",
    "worker_clustering",
]
