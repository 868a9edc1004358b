"""Around your loop: a classifier with its objective, the callback that runs an objective's schedule, restarts."""

from crowdnal.training._callbacks import EMCallback, ObjectiveCallback
from crowdnal.training._compare import CANDIDATES, VOTES, Comparison, compare
from crowdnal.training._crossfit import CrossFit
from crowdnal.training._mixing import mixed
from crowdnal.training._model import CrowdModel, CrowdOutput, attach, unwrapped
from crowdnal.training._optim import param_groups
from crowdnal.training._predict import predict_items
from crowdnal.training._restarts import Restarts, best_of_restarts
from crowdnal.training._shares import batch_shares
from crowdnal.training._timm import classify, has_single_head, is_timm, pre_logits

__all__ = [
    "CANDIDATES",
    "Comparison",
    "CrossFit",
    "CrowdModel",
    "CrowdOutput",
    "EMCallback",
    "ObjectiveCallback",
    "Restarts",
    "VOTES",
    "attach",
    "batch_shares",
    "best_of_restarts",
    "classify",
    "compare",
    "has_single_head",
    "is_timm",
    "mixed",
    "param_groups",
    "pre_logits",
    "predict_items",
    "unwrapped",
]
