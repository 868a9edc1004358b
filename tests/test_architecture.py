"""The house: what stands where, who may use what. The order of the packages is import-linter's, in pyproject.toml."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import crowdnal

PACKAGE = Path(crowdnal.__file__).parent
MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(crowdnal.__path__, "crowdnal.")
    if not info.name.startswith("crowdnal._c")  # the native libraries
)
PUBLIC = """
    LIA LIAML CMM DLDS DLEM DLWC MBEM CCC Annotations CCCOutput CoNAL CoNALEM CoNALEMResult CrowdDataset CrowdLayer
    CrowdModel CrowdOutput DLAggregate DawidSkeneResult DoctorNet EMCallback GeoCrowdNet MMCEResult MajorityVote MaxMIG
    Objective OverparametrizedCrowdLayer Restarts SingleConfusion SoftBootstrap SoftMajorityVote TraceRegularized
    UnionNet Vocabulary WeightedDoctorNet WorkerClusteringResult aggregate as_annotations attach backend
    best_of_restarts collate conal_em concat dawid_skene functional metrics multilabel mmce objectives one_coin
    posterior simulation worker_clustering
""".split()
ROOMS = """
    aggregation ccc cli confusion data functional integrations metrics multilabel objectives ops reference simulation
    train training
""".split()


def source(module: str) -> Path:
    path = PACKAGE.parent / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def room(module: str) -> str:
    """The top-level package or module that it belongs to."""
    return module.split(".")[1] if "." in module else ""


def imports(module: str) -> list[tuple[int, str]]:
    """Line and dotted name of everything of crowdnal that a module imports."""
    found = []
    for node in ast.walk(ast.parse(source(module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} is a relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return [(line, name) for line, name in found if name.partition(".")[0] == "crowdnal"]


def test_the_rooms_are_those_of_the_house() -> None:
    tops = {name.split(".")[1] for name in MODULES}
    assert {top for top in tops if not top.startswith("_")} == set(ROOMS)
    assert {top for top in tops if top.startswith("_")} == {"__main__", "_utils"}


def test_no_package_reaches_into_the_underscore_of_another() -> None:
    reached = [
        f"{module}:{line} {name}"
        for module in MODULES
        for line, name in imports(module)
        if room(name) != room(module)
        and any(part.startswith("_") and not part.startswith("__") for part in name.split(".")[2:])
    ]
    assert reached == []


@pytest.mark.parametrize("module", [name for name in MODULES if source(name).name == "__init__.py"] + ["crowdnal"])
def test_no_public_name_hides_a_module(module: str) -> None:
    package = importlib.import_module(module)
    for info in pkgutil.iter_modules(package.__path__):
        if hasattr(package, info.name):
            assert getattr(package, info.name) is importlib.import_module(f"{module}.{info.name}")


def test_public_names_stay() -> None:
    assert set(PUBLIC) <= set(crowdnal.__all__)
    for name in crowdnal.__all__:
        assert hasattr(crowdnal, name), name


@pytest.mark.parametrize("module", [name for name in MODULES if "__main__" not in name])
def test_every_name_in_all_is_there(module: str) -> None:
    if module.startswith("crowdnal.integrations."):  # of libraries that need not be there
        loaded = pytest.importorskip(module, exc_type=ImportError)
    else:
        loaded = importlib.import_module(module)
    for name in getattr(loaded, "__all__", ()):
        assert hasattr(loaded, name), name


# Sums of floats in the order in which threads happen to come, on CUDA
UNORDERED = {"index_add", "scatter_add", "index_reduce"}
ORDERED = {  # function -> why its result is the same in every bit all the same
    "crowdnal.data.annotations.votes": "integers",
    "crowdnal.objectives.lia.pair_em._remember": "integers",
    "crowdnal.objectives.geocrowdnet._weights": "every term is the same",
}


def test_no_sum_is_in_the_order_of_the_threads() -> None:
    """But those of the definitions, which serve where there are no kernels."""
    found = set()
    for module in MODULES:
        for function in ast.walk(ast.parse(source(module).read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                name = node.attr.rstrip("_") if isinstance(node, ast.Attribute) else ""
                if name in UNORDERED and not (room(module) == "reference" and function.name in crowdnal.ops.OPS):
                    found.add(f"{module}.{function.name}")
    assert found == set(ORDERED)
