"""crowdnal: train classifiers on labels from many imperfect annotators."""

from crowdnal.ops import backend

__version__ = "0.1.0"
