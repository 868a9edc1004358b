"""Fixtures of more than one folder."""

from __future__ import annotations

import fcntl
import os
from collections import Counter

if "PYTEST_XDIST_WORKER" in os.environ:  # a process for each core
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from support.emulated import NAME, Emulated, build
from support.native import not_of_the_kernels

from crowdnal.ops import OPS


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for the whole of the tests, none for a part of them."""
    return 2 if config.args_source is pytest.Config.ArgsSource.TESTPATHS else 0


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """The CUDA kernels on the emulator, built once: where several processes share the tests, by the first of them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulated"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = build(folder)  # nothing to do for the second
    return Emulated(library)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked ``quick(n)`` the first n variants are quick, the others slow."""
    seen: Counter[str] = Counter()
    for item in items:
        if (quick := item.get_closest_marker("quick")) is not None and item.get_closest_marker("slow") is None:
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if seen[test] > quick.args[0]:
                item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of the CUDA kernels fail where something else would serve in their place."""
    if item.get_closest_marker("cuda") is not None and (why := not_of_the_kernels()) is not None:
        pytest.fail(why, pytrace=False)


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
