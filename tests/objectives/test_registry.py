"""A method is one file: what finds it, in this package or in another one, and what its constructor tells."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import pytest
import torch
from support import small_run
from torch import Tensor

import crowdnal
from crowdnal import cli
from crowdnal.objectives import (
    OBJECTIVES,
    Batch,
    ConfusionOptions,
    Objective,
    ObjectiveOptions,
    SoftmaxObjective,
    _registry,
    create,
    register,
    table,
)
from crowdnal.train.config import InputError
from crowdnal.train.options import parse_options

METHOD = '''
"""One error rate for all annotators."""

from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crowdnal.objectives import Batch, Objective, ObjectiveOptions, register


@register("one-rate", link="(1 - e) p + e / K", source="Nobody 2026")
class OneRate(Objective):
    """Labels are right, or drawn evenly with one probability for everyone.

    Args:
        rate: e, at first.
    """

    def __init__(
        self, num_classes: int, num_annotators: int, *, rate: float = 0.2, **common: Unpack[ObjectiveOptions]
    ) -> None:
        super().__init__(num_classes, num_annotators, **common)
        self.require_square("OneRate")
        self.rate = rate
        self.logit = nn.Parameter(torch.logit(torch.tensor(rate)))

    def _matrix(self) -> Tensor:
        e, eye = self.logit.sigmoid(), torch.eye(self.num_classes, device=self.logit.device)
        return (1 - e) * eye + e / self.num_classes

    def confusion(self) -> Tensor:
        return self._matrix().detach().expand(self.num_annotators, -1, -1)

    def _nll(self, batch: Batch) -> Tensor:
        q = batch.logits.softmax(-1) @ self._matrix().to(batch.logits.dtype)
        nll = F.nll_loss(q.log()[batch.annotations.item], batch.annotations.label, reduction="none")
        return nll if batch.reduction == "none" else nll.mean()
'''


def package(folder: Path, name: str, points: dict[str, str], **modules: str) -> Path:
    """Installs a distribution: its modules beside a dist-info, as pip leaves them."""
    info = folder / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    lines = "".join(f"{point} = {value}\n" for point, value in points.items())
    (info / "entry_points.txt").write_text(f"[crowdnal.objectives]\n{lines}")
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    return folder


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts a package on the path of this process, which forgets it afterwards."""
    monkeypatch.setattr(_registry, "_known", dict(_registry._known))

    def put(name: str, points: dict[str, str], **modules: str) -> Path:
        folder = package(tmp_path / name, name, points, **modules)
        monkeypatch.syspath_prepend(str(folder))
        for module in modules:  # setitem first, so that the end of the test removes what an import leaves
            monkeypatch.setitem(sys.modules, module, sys)
            monkeypatch.delitem(sys.modules, module)
        return folder

    return put


# Another package


def test_a_method_of_another_package_trains_by_the_command(tmp_path: Path) -> None:
    site = package(tmp_path / "site", "crowd-rate", {"one-rate": "crowd_rate:OneRate"}, crowd_rate=METHOD)
    root = small_run.write(tmp_path / "data")
    config = small_run.frozen(root, tmp_path / "out", objective="one-rate", options=("rate=0.3",), epochs=15)
    path = os.pathsep.join([str(site), str(Path(crowdnal.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "crowdnal", *small_run.arguments(config)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    annotators = small_run.read(tmp_path / "out" / "annotators.csv")
    spammer = {float(value) for value in annotators["spammer_score"] if value}
    assert len(annotators) == len(small_run.WORKERS) and len(spammer) == 1
    assert abs(spammer.pop() - (1 - 0.3) ** 2) > 0.01  # it learnt the rate
    labels = small_run.read(tmp_path / "out" / "labels.csv")
    assert len(labels) >= small_run.N


def test_the_list_and_the_table_show_it(
    install: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(OBJECTIVES)
    install("crowd-rate", {"one-rate": "crowd_rate:OneRate"}, crowd_rate=METHOD)
    assert "crowd_rate" not in sys.modules and len(OBJECTIVES) == before + 1 and "one-rate" in list(OBJECTIVES)
    assert "crowd_rate" not in sys.modules  # names alone import nothing
    assert cli.main(["objectives"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"^one-rate +Labels are right.*\n +\(1 - e\) p \+ e / K; Nobody 2026$", listed, flags=re.M)
    assert cli.main(["objectives", "--markdown"]) == 0
    assert "| `one-rate` | `OneRate` | (1 - e) p + e / K | Nobody 2026 |" in capsys.readouterr().out
    assert "one-rate" not in table() and "one-rate" in table(plugins=True)
    made = create("one-rate", num_classes=3, num_annotators=2, rate=0.4)
    assert "rate=0.4" in repr(made) and made.name == "one-rate"
    assert parse_options(OBJECTIVES["one-rate"], ("rate=0.5",)) == {"rate": 0.5}
    with pytest.raises(InputError, match="'rite' is unknown to one-rate: it takes rate .a number., reduction"):
        parse_options(OBJECTIVES["one-rate"], ("rite=0.5",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_library\n", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("Other = 1\n", "AttributeError"),
        ("class OneRate: pass\n", r"is not registered: decorate its class with @register\('one-rate'"),
        (METHOD.replace('"one-rate"', '"two-rates"'), "is not registered"),
        (METHOD.replace('"one-rate"', '"trace"'), "objective 'trace' is crowdnal.objectives.trace.TraceRegularized"),
    ],
)
def test_a_broken_package_is_named_and_harms_no_other(
    install: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    install("crowd-rate", {"one-rate": "crowd_rate:OneRate"}, crowd_rate=text)
    create("trace", num_classes=3, num_annotators=2)
    told = r"objective 'one-rate' of crowd-rate 1.2 \(crowd_rate:OneRate\).*" + message
    with pytest.raises(ImportError, match=told):
        create("one-rate", num_classes=3, num_annotators=2)
    assert cli.main(["objectives"]) == 0
    output = capsys.readouterr()
    assert re.search(f"^crowdnal: warning: {told}", output.err) and len(output.err.splitlines()) == 1
    assert re.search("^crowd-layer +Cross-entropy", output.out, flags=re.M)
    root = small_run.write(tmp_path / "data")
    words = small_run.arguments(small_run.frozen(root, tmp_path / "out", objective="one-rate"))
    assert cli.main(words) == 2
    assert re.search(f"^crowdnal: error: {told}", capsys.readouterr().err)


def test_a_name_is_offered_once(install: Callable[..., Path]) -> None:
    install("crowd-rate", {"one-rate": "crowd_rate:OneRate"}, crowd_rate=METHOD)
    install("another", {"one-rate": "another:OneRate"}, another=METHOD)
    with pytest.raises(ImportError, match=r"'one-rate' is offered by (crowd-rate|another) 1.2 and by (crowd|another)"):
        list(OBJECTIVES)
    assert cli.main(["objectives"]) == 2


def test_a_name_of_this_package_is_taken(install: Callable[..., Path]) -> None:
    install("crowd-rate", {"trace": "crowd_rate:OneRate"}, crowd_rate=METHOD)
    with pytest.raises(ImportError, match="'trace' is offered by crowdnal and by crowd-rate 1.2: uninstall one"):
        OBJECTIVES["trace"]


# This package


def test_a_new_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "_known", dict(_registry._known))
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "some_methods" / "deep"
    folder.mkdir(parents=True)
    for place, text in (
        ("__init__", ""),
        ("_private", "raise SystemExit"),
        ("deep/__init__", ""),
        ("deep/rate", METHOD),
    ):
        (tmp_path / "some_methods" / f"{place}.py").write_text(text)
    __import__("some_methods")
    try:
        _registry.discover("some_methods")
        assert OBJECTIVES["one-rate"].__module__ == "some_methods.deep.rate"
    finally:
        for name in [name for name in sys.modules if name.startswith("some_methods")]:
            del sys.modules[name]


def test_every_file_of_a_method_is_reached_and_named_once() -> None:
    assert all(cls.name == name and cls.link for name, cls in OBJECTIVES.items())
    assert {cls.__name__ for cls in OBJECTIVES.values()} | {"LIAML", "Objective"} <= set(crowdnal.__all__)
    for cls in OBJECTIVES.values():
        assert getattr(crowdnal, cls.__name__) is getattr(crowdnal.objectives, cls.__name__) is cls
    rows = [row.split(" | ") for row in table().splitlines()]
    assert {len(row) for row in rows} == {4} and [row[0][3:-1] for row in rows[2:]] == list(OBJECTIVES)


def test_two_classes_of_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "_known", dict(_registry._known))

    def make() -> type[Objective]:
        @register("mine", link="p")
        class Mine(Objective):
            """Nothing."""

        return Mine

    make()
    again = make()  # the cell of a notebook, run twice
    assert OBJECTIVES["mine"] is again and "| `mine` | `Mine` | p | |" in table(plugins=True)
    with pytest.raises(ValueError, match=r"'mine' is .*Mine, .*Other needs another name"):
        register("mine", link="p")(type("Other", (Objective,), {"__module__": __name__}))


# Constructors


@pytest.mark.parametrize("name", [*OBJECTIVES, "lia-ml"])
def test_every_option_is_told(name: str) -> None:
    cls = crowdnal.LIAML if name == "lia-ml" else OBJECTIVES[name]
    signature = inspect.signature(cls)
    parameters = list(signature.parameters.values())
    assert [p.name for p in parameters[:2]] == ["num_classes", "num_annotators"]
    assert all(p.kind is p.KEYWORD_ONLY and not isinstance(p.annotation, str) for p in parameters[2:])
    assert {"num_labels", "reduction"} <= set(signature.parameters)
    arguments = (inspect.getdoc(cls) or "").partition("\nArgs:\n")[2]
    described = re.findall(r"^    (\w+): ", arguments, flags=re.M)
    assert sorted(described) == sorted(signature.parameters), name


@pytest.mark.parametrize("name", OBJECTIVES)
def test_defaults_are_those_that_act(name: str) -> None:
    """Given as the signature tells them they change nothing."""
    cls = OBJECTIVES[name]
    told = {p.name: p.default for p in inspect.signature(cls).parameters.values() if p.default is not p.empty}
    torch.manual_seed(0)
    plain = cls(3, 4)
    torch.manual_seed(0)
    given = cls(3, 4, **told)
    assert repr(plain) == repr(given) and plain.reduction == told["reduction"]
    known = {k: v for k, v in vars(plain).items() if isinstance(v, (bool, int, float, str))}
    assert known == {k: vars(given)[k] for k in known}
    assert {k: v for k, v in known.items() if k in told and k not in ("training", "num_labels")}.items() <= told.items()


class Layered(SoftmaxObjective):
    """Of two options.

    Args:
        own: of its own.
    """

    def __init__(self, num_classes: int, num_annotators: int, *, own: int, **common: Unpack[ConfusionOptions]) -> None:
        super().__init__(num_classes, num_annotators, **common)
        self.own = own
        self.annotators = self.free_matrices()


class Below(Layered):
    """No constructor of its own."""


def test_a_subclass_has_the_options_of_its_bases() -> None:
    names = ["num_classes", "num_annotators", "own", "groups", "rank", "confusion_prior", "num_labels", "reduction"]
    names += ["class_weight", "label_smoothing", "focal"]
    assert list(inspect.signature(Layered).parameters) == list(inspect.signature(Below).parameters) == names
    assert inspect.signature(Below).parameters["rank"].annotation == int | None
    told = inspect.getdoc(Below) or ""
    assert told.startswith("No constructor") and "own: of its own." in told and "rank: each matrix is" in told
    objective = Below(3, 4, own=2, rank=1, groups=[0, 0, 1, 1])
    assert "reduction='mean', own=2, rank=1, groups=2" in repr(objective)
    with pytest.raises(TypeError, match="rnk"):
        Below(3, 4, own=2, rnk=1)  # type: ignore[call-arg]


def test_a_class_within_a_function_and_one_with_any_options() -> None:
    class Local: ...

    class Inner(Objective):
        """Local annotation."""

        def __init__(self, num_classes: int, *, what: Local | None = None, **rest: Unpack[ObjectiveOptions]) -> None:
            super().__init__(num_classes, 2, **rest)

        def _nll(self, batch: Batch) -> Tensor:
            return batch.logits.sum()

    class Loose(Objective):
        def __init__(self, *sizes: int, extra: float = 1.0, **options: Any) -> None:
            super().__init__(*sizes, **options)
            self.extra = extra

    assert "what" in inspect.signature(Inner).parameters and Inner(3, reduction="sum").reduction == "sum"
    assert list(inspect.signature(Loose).parameters) == ["sizes", "extra", "options"]
    assert "reduction='sum', extra=2.0" in repr(Loose(3, 2, extra=2.0, reduction="sum")) and Loose.__doc__ is None
