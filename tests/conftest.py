"""Fixtures of more than one folder."""

from __future__ import annotations

import pytest
import torch
from support.emulated import NAME, Emulated, build

from crowdnal.ops import OPS


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """The CUDA kernels on the emulator, built once."""
    return Emulated(build(tmp_path_factory.mktemp("emulated")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.markexpr == "not slow":
        terminalreporter.write_line(
            "Slow tests were left out: pytest -m slow runs those alone, pytest -m '' everything."
        )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "op_kernels" in metafunc.fixturenames:
        once = metafunc.definition.get_closest_marker("installed_kernels") is not None
        warns = pytest.mark.filterwarnings("ignore:There is a performance drop")
        emulated = pytest.param("emulated", marks=[pytest.mark.slow, warns])
        metafunc.parametrize("op_kernels", ["installed"] if once else ["installed", emulated], indirect=True)


@pytest.fixture
def op_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose kernels the ops run: those installed, or those of CUDA on the emulator."""
    if request.param == "emulated":
        request.getfixturevalue("emulated")
        for name in OPS:
            monkeypatch.setattr(torch.ops.crowdnal, name, getattr(getattr(torch.ops, NAME), name))
    return request.param
