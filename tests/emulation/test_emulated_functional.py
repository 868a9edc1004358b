"""The tests of the losses once more, through the emulated CUDA kernels: values, options, gradients to second order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import test_functional
import test_pair_confusion
import torch
from emulated import NAME, Emulated
from test_functional import problem, small  # noqa: F401
from test_pair_confusion import case  # noqa: F401

from crowdnal.ops import OPS

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

for _module in (test_functional, test_pair_confusion):
    for _name, _value in vars(_module).items():
        if "compiled" in _name or "autocast" in _name:  # which know the ops by their name
            continue
        if _name.startswith("test_"):
            globals()[_name.replace("test_", f"{_module.__name__}_", 1)] = _value


@pytest.fixture(autouse=True, scope="module")
def through_the_emulator(emulated: Emulated) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in OPS:
            patch.setattr(torch.ops.crowdnal, name, getattr(getattr(torch.ops, NAME), name))
        yield
