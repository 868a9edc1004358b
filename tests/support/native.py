"""Whether the tests of the CUDA kernels would test those."""

from __future__ import annotations

import torch

import crowdnal


def not_of_the_kernels() -> str | None:
    """Why tests on a GPU would compare the reference with itself and pass, or None."""
    if not torch.cuda.is_available() or crowdnal.backend()["cuda"] == "native":
        return None
    return (
        f"there is a GPU, but {crowdnal.__file__} has no native CUDA library, so that plain PyTorch would "
        "be tested in place of the kernels: CROWDNAL_REQUIRE_NATIVE=1 pip install -e . (with nvcc), and see "
        "crowdnal.backend()"
    )
