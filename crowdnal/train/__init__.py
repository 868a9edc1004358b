"""``crowdnal train`` as a library: a folder of images and a file of annotations to a trained timm model."""

from crowdnal.train._run import Interrupted, plan, run
from crowdnal.train.config import InputError, TrainConfig
from crowdnal.train.processes import OtherProcessFailed
from crowdnal.train.session import Result

__all__ = ["InputError", "Interrupted", "OtherProcessFailed", "Result", "TrainConfig", "plan", "run"]
