"""How an annotator's confusion is parametrised, as modules.

Every module shows its confusions as ``probs() -> [R, C, K]``: detached, row = true class, column = observed
label, rows sum to 1. What is stored (and trained) differs with the link and is documented in each class.
"""

from crowdnal.confusion._full import (
    FreeConfusion,
    Normalization,
    NormalizedConfusion,
    VectorConfusion,
    eye,
    root,
    shared_scores,
    whole,
)
from crowdnal.confusion.low_rank import BlockwiseConfusion, LowRankConfusion, LowRankMixture
from crowdnal.confusion.stacked import Hidden, StackedConfusion

__all__ = [
    "FreeConfusion",
    "Hidden",
    "LowRankConfusion",
    "LowRankMixture",
    "Normalization",
    "NormalizedConfusion",
    "BlockwiseConfusion",
    "StackedConfusion",
    "VectorConfusion",
    "eye",
    "root",
    "shared_scores",
    "whole",
]
