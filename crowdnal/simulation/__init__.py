"""Crowds drawn from known confusions, to see whether a method finds them."""

from crowdnal.simulation._ability_levels import AbilityLevels, ability_levels, perturbed_confusions
from crowdnal.simulation._simulate import (
    CommonAndIndividual,
    common_and_individual,
    hammer_spammer_confusions,
    pair_flip_confusions,
    simulate,
    symmetric_confusions,
)
from crowdnal.simulation._sparse_crowds import SETTINGS, SparseCrowd, sparse_crowd

__all__ = [
    "SETTINGS",
    "AbilityLevels",
    "CommonAndIndividual",
    "SparseCrowd",
    "ability_levels",
    "common_and_individual",
    "hammer_spammer_confusions",
    "pair_flip_confusions",
    "perturbed_confusions",
    "simulate",
    "sparse_crowd",
    "symmetric_confusions",
]
