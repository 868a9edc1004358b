"""What every emulated kernel is checked for."""

from __future__ import annotations

from typing import Any

import torch

from crowdnal import reference
from support import op_checks
from support.emulated import MOST_BLOCKS, Emulated


def check(emulated: Emulated, name: str, args: tuple[Any, ...]) -> None:
    """Values in double and single precision, and the same bits in every order of threads and blocks."""
    op, wanted = emulated.op(name), getattr(reference, name)
    op_checks.check_values(op, wanted, args)
    op_checks.check_float_error(op, wanted, args)
    check_bitwise(emulated, name, op_checks.to_float(args))


def check_bitwise(emulated: Emulated, name: str, args: tuple[Any, ...]) -> None:
    outs = [
        op_checks.as_tuple(emulated.op(name, seed, blocks)(*args))
        for seed, blocks in ((1, MOST_BLOCKS), (2, 1), (3, 3))
    ]
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))
