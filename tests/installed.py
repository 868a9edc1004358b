"""Every op of the installed crowdnal against the plain PyTorch reference: `python tests/installed.py --native`.

A minute or less, for machines and environments that have little else: needs pytest and hypothesis beside torch.
"""

from __future__ import annotations

import argparse
import platform
import sys
import warnings

import torch
from support import op_checks
from support.op_arguments import ALL, of_every_kind
from support.problems import make_problem

import crowdnal
from crowdnal import reference
from crowdnal.ops import OPS

SIZES = [(12, 5, 4, 3, 4), (64, 9, 8, 8, 6), (30, 10, 33, 30, 5), (3, 1, 5, 7, 400), (0, 3, 2, 2, 1)]


def check() -> int:
    """Values, float32 error, layouts and threads of every op; returns of how many argument lists."""
    assert set(OPS) == {*ALL, "select"}
    count = 0
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        matrices, chosen = torch.arange(600).view(10, 12, 5).to(dtype), torch.tensor([9, 0, 3, 3])
        op_checks.assert_same(torch.ops.crowdnal.select(matrices, chosen), matrices[chosen], "select")
        count += 1
    for sizes in SIZES:
        problem = make_problem(*sizes, seed=3)
        for name in ALL:
            op, plain = getattr(torch.ops.crowdnal, name), getattr(reference, name)
            for args in of_every_kind(problem, name):
                op_checks.check_values(op, plain, args)
                op_checks.check_float_error(op, plain, args)
                op_checks.check_layouts(op, args)
                op_checks.check_bitwise(op, args)
                count += 1
    return count


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", action="store_true", help="fail where the reference serves the CPU")
    native = parser.parse_args().native
    warnings.simplefilter("error" if native else "default", UserWarning)
    count = check()
    print(
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}: "
        f"{crowdnal.backend()} from {crowdnal.__file__}: {len(OPS)} ops, {count} argument lists as the reference"
    )
    sys.exit(native and crowdnal.backend()["cpu"] != "native")
