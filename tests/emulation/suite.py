"""Tests of the CPU, with the emulated CUDA kernels as the CPU's ops: gradients, transforms and objectives through them.

python tests/emulation/suite.py tests/test_functional.py ...
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["CROWDNAL_DISABLE_NATIVE"] = "1"

import pytest
import torch
from emulated import build

with tempfile.TemporaryDirectory() as folder:
    torch.ops.load_library(build(Path(folder), "crowdnal"))
assert torch._C._dispatch_has_kernel_for_dispatch_key("crowdnal::mix", "CPU")
sys.exit(pytest.main(sys.argv[1:]))
