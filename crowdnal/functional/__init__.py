"""The losses and primitives on `Annotations`, differentiable to any order, native where the library was built."""

from crowdnal.functional._autograd._function import Normalization
from crowdnal.functional.losses import crowd_cross_entropy, crowd_marginal_nll, crowd_mixture_nll, crowd_posterior
from crowdnal.functional.primitives import (
    em_step,
    label_counts,
    label_log_likelihood,
    mix,
    mix_annotators,
    mix_items,
    mixture_step,
    pair_confusion,
    segment_sum,
)
from crowdnal.functional.reduction import Reduction

__all__ = [
    "Normalization",
    "Reduction",
    "crowd_cross_entropy",
    "crowd_marginal_nll",
    "crowd_mixture_nll",
    "crowd_posterior",
    "em_step",
    "label_log_likelihood",
    "label_counts",
    "mix",
    "mix_annotators",
    "mix_items",
    "mixture_step",
    "pair_confusion",
    "segment_sum",
]
