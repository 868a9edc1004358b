"""Sums over 200,000 annotations of one item or one annotator, in float32 by the native kernels."""

from __future__ import annotations

import pytest
import torch
from support.long_segments import OUTPUTS, WHERE, check_long_segments
from support.op_checks import native


@pytest.mark.quick(6)
@native
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", OUTPUTS)
def test_long_segments_lose_no_accuracy(name: str, where: str) -> None:
    check_long_segments(getattr(torch.ops.crowdnal, name), name, where)
