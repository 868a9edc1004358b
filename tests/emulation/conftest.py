"""One build of the emulated kernels for all tests."""

from __future__ import annotations

import pytest
from support.emulated import Emulated, build


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated(build(tmp_path_factory.mktemp("emulated")))
