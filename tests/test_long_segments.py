"""Sums over 200,000 annotations of one item or one annotator, in float32 by the native kernels."""

from __future__ import annotations

import pytest
import test_joint_ops
import test_ops
import torch
from long_segments import WHERE, errors, long_problem
from pairs import make_pairs
from test_ops import native

from crowdnal import reference

OUTPUTS = {  # whose terms do not cancel
    "mix_items": (0,),
    "mix_annotators": (0,),
    "softmax_link_backward": (2,),
    "mixture_link_backward": (0,),
    "evidence": (0,),
    "counts": (0,),
    "joint_link": (0, 1),
    "em_step": (2, 3),
    "pair_confusion_backward": (0, 1),
}


@native
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", OUTPUTS)
def test_long_segments_lose_no_accuracy(name: str, where: str) -> None:
    for sizes in ((3, 3), (2, 34)) if name.startswith("mix_") else ((3, 3),):
        problem = long_problem(where, *sizes)
        if name.startswith("pair"):
            args = make_pairs(problem, 2).arguments(name)[0]
        elif name in test_joint_ops.NAMES:
            args = test_joint_ops.arguments(problem, name, reference.NONE)[1 if name == "em_step" else 0]
        else:
            args = test_ops.arguments(problem, name, reference.NONE)[0]
        found = errors(getattr(torch.ops.crowdnal, name), getattr(reference, name), args)
        assert max(found[output] for output in OUTPUTS[name]) < 2e-6
