"""What every emulated kernel is checked for."""

from __future__ import annotations

from typing import Any

from crowdnal import reference
from crowdnal.ops import OPS
from support import op_checks
from support.compare import assert_same
from support.emulated import MOST_BLOCKS, Emulated


def check(emulated: Emulated, name: str, args: tuple[Any, ...]) -> None:
    """Values in double and single precision, and the same bits in every order of threads and blocks."""
    op, wanted = emulated.op(name), getattr(reference, name)
    op_checks.check_values(op, wanted, args)
    op_checks.check_float_error(op, wanted, args)
    check_bitwise(emulated, name, op_checks.to_float(args))


def check_bitwise(emulated: Emulated, name: str, args: tuple[Any, ...]) -> None:
    first = op_checks.as_tuple(emulated.op(name, 1, MOST_BLOCKS)(*args))
    for seed, blocks in ((2, 1), (3, 3)):
        assert_same(op_checks.as_tuple(emulated.op(name, seed, blocks)(*args)), first, "output")
    if "plan" in OPS[name].arguments._fields:
        without = OPS[name].arguments(*args)._replace(plan=None)
        assert_same(op_checks.as_tuple(emulated.op(name)(*without)), first, "output without a plan")
