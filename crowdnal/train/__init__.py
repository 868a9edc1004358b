"""``crowdnal train`` as a library: a folder of images and a file of annotations to a trained timm model."""

from crowdnal.train.config import InputError, TrainConfig
from crowdnal.train.run import Interrupted, Result, run

__all__ = ["InputError", "Interrupted", "Result", "TrainConfig", "run"]
