"""Around your loop: a classifier with its objective, the callback that runs an objective's schedule, restarts."""

from crowdnal.training._callbacks import EMCallback, ObjectiveCallback
from crowdnal.training._model import CrowdModel, CrowdOutput, attach, classify, has_single_head, is_timm, pre_logits
from crowdnal.training._predict import predict_items
from crowdnal.training._restarts import Restarts, best_of_restarts

__all__ = [
    "CrowdModel",
    "CrowdOutput",
    "EMCallback",
    "ObjectiveCallback",
    "Restarts",
    "attach",
    "best_of_restarts",
    "classify",
    "has_single_head",
    "is_timm",
    "pre_logits",
    "predict_items",
]
