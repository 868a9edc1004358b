"""Around your loop: a classifier with its objective, the callback that runs an objective's schedule, restarts."""

from crowdnal.training._callbacks import EMCallback, ObjectiveCallback
from crowdnal.training._model import CrowdModel, CrowdOutput, attach, evaluating, is_timm
from crowdnal.training._restarts import Restarts, best_of_restarts

__all__ = [
    "CrowdModel",
    "CrowdOutput",
    "EMCallback",
    "ObjectiveCallback",
    "Restarts",
    "attach",
    "best_of_restarts",
    "evaluating",
    "is_timm",
]
