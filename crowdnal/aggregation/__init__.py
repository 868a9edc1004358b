"""The true labels from annotations alone, by many methods; what EM objectives share with them is in submodules.

:mod:`crowdnal.aggregation.em` holds the M-step, the loop and the checks of EM on confusions,
:mod:`crowdnal.aggregation.common_confusion` the model of CoNAL's EM variant, :mod:`crowdnal.aggregation.clustering`
K-means of annotators and annotations.
"""

from crowdnal.aggregation._bayesian import BCCResult, ebcc, ibcc
from crowdnal.aggregation._bwa import BWAResult, bwa
from crowdnal.aggregation._choice import CANDIDATES, Choice, choose
from crowdnal.aggregation._communities import CBCCResult, cbcc
from crowdnal.aggregation._conal_em import CoNALEMResult, conal_em
from crowdnal.aggregation._dawid_skene import DawidSkeneResult, dawid_skene
from crowdnal.aggregation._external import AGGREGATORS, aggregate, check_method
from crowdnal.aggregation._feature_em import FeatureEMResult, feature_em
from crowdnal.aggregation._mmce import MMCEResult, mmce
from crowdnal.aggregation._one_coin import one_coin
from crowdnal.aggregation._posterior import posterior, posterior_of_log_likelihood
from crowdnal.aggregation._votes import vote_log_confusion, vote_proportions
from crowdnal.aggregation._worker_clustering import WorkerClusteringResult, worker_clustering

__all__ = [
    "AGGREGATORS",
    "CANDIDATES",
    "BCCResult",
    "BWAResult",
    "CBCCResult",
    "Choice",
    "CoNALEMResult",
    "DawidSkeneResult",
    "FeatureEMResult",
    "MMCEResult",
    "WorkerClusteringResult",
    "aggregate",
    "bwa",
    "cbcc",
    "check_method",
    "choose",
    "conal_em",
    "dawid_skene",
    "ebcc",
    "feature_em",
    "ibcc",
    "mmce",
    "one_coin",
    "posterior",
    "posterior_of_log_likelihood",
    "vote_log_confusion",
    "vote_proportions",
    "worker_clustering",
]
