"""Coupled Confusion Correction (Zhang et al. 2024): two models, each corrected by what the other finds clean."""

from crowdnal.ccc.both import joint
from crowdnal.ccc.module import CCC
from crowdnal.ccc.step import CCCOutput

__all__ = ["CCC", "CCCOutput", "joint"]
