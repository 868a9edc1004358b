"""The pages of docs: their code is run, and what they name and link to exists."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
import yaml
from PIL import Image
from support.compare import assert_close
from support.pages import PAGES, ROOT, blocks, name_of, prose, run, text_of

import crowdnal
from crowdnal import objectives, simulation
from crowdnal.objectives import _registry
from crowdnal.train.config import options_table

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TREES = ("crowdnal", "csrc", "tests", "docs", "examples", "benchmarks", "_build", ".ci", ".github")
Scope = dict[str, Any]


def crowd() -> Scope:
    """59 annotators of 8 classes: the data behind `loader` and `dataset`."""
    annotations = simulation.simulate(
        torch.arange(32) % 8, simulation.symmetric_confusions(59, 8, 0.8), annotations_per_item=3, seed=0
    )
    images = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    dataset = crowdnal.CrowdDataset(images, annotations)
    loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True, collate_fn=crowdnal.collate)
    return {"dataset": dataset, "loader": loader, "held_out_loader": loader, "images": images, "epochs": 3}


def answers() -> Scope:
    """A file with the labels of three workers."""
    rows = [f"{item},{worker},{item % 3}" for item in range(6) for worker in ("ann", "bob", "cem")]
    Path("answers.csv").write_text("\n".join(["task,worker,label", *rows]) + "\n", encoding="utf-8")
    return {}


def photos() -> Scope:
    """The same, for images in a folder."""
    Path("photos").mkdir()
    for item in range(6):
        Image.new("RGB", (32, 32), (40 * item, 0, 0)).save(f"photos/{item}.png")
    answers()
    text = re.sub(r"^(\d)", r"\1.png", Path("answers.csv").read_text(encoding="utf-8"), flags=re.M)
    Path("answers.csv").write_text(text, encoding="utf-8")
    return {}


def judgements() -> Scope:
    """466 workers who choose from 14 tags."""
    rows = [f"s{worker % 40},w{worker},T{worker % 14}|T{(worker + 1) % 14}" for worker in range(466)]
    Path("judgments.csv").write_text("\n".join(["task,worker,relations", *rows]) + "\n", encoding="utf-8")
    return {"sentences": torch.randn(40, 384), "encoder": torch.nn.Identity()}


def check_loops(scope: Scope, printed: str) -> None:
    assert printed.count("Round(") == 2  # EM is due before the second and the third epoch
    assert len(scope["log_likelihoods"]) == 2 and scope["model"].objective.name == "cmm"
    assert scope["score"] < 0
    assert scope["out_of_fold"].shape == scope["unseen"].shape == (32, 8)
    assert not torch.allclose(scope["out_of_fold"], scope["unseen"])
    assert scope["ccc"].corrects and scope["ccc"].groups.unique().numel() > 1
    assert_close(scope["probs"].sum(1), torch.ones(len(scope["images"])))


def check_concepts(scope: Scope, printed: str) -> None:
    p, A = scope["p"][0], scope["A"]
    softmax = torch.stack([(p @ A[r]).softmax(0)[y] for r, y in ((0, 0), (1, 1))])
    assert_close(scope["softmax_link"], -softmax.log())
    mixture = torch.stack([p @ A[0, :, 0], p @ A[1, :, 1]])
    assert_close(scope["mixture_link"], -mixture.log())
    assert_close(scope["joint_link"], -(p * A[0, :, 0] * A[1, :, 1]).sum().log()[None])


def check_command(scope: Scope, printed: str) -> None:
    shown = set(
        re.findall(r"`([\w.]+)`", "".join(re.findall(r"^\| (`.*?) \|", text_of("docs/command.md"), flags=re.M)))
    )
    files = {path.name for path in Path("run1").iterdir()}
    assert {name for name in shown if "." in name} | {"model_selected"} <= files
    assert scope["result"].estimates.reliability.shape == (3,)
    assert text_of("docs/command.md").endswith(f"\n\n{options_table().rstrip()}\n")


def check_aggregation(scope: Scope, printed: str) -> None:
    assert scope["result"].labels.tolist() == [0, 1, 2, 0, 1, 2]
    names = re.findall(r'"([\w-]+)"', text_of("docs/aggregation.md").partition("AGGREGATORS)  #")[2].partition("\n")[0])
    assert names and set(names) <= set(crowdnal.aggregation.AGGREGATORS)


def check_tags(scope: Scope, printed: str) -> None:
    scope["callback"].on_epoch_start(0)
    for sentences, labels in scope["loader"]:
        assert scope["model"](sentences, labels).loss.isfinite()
    assert scope["model"].objective.tag_confusion().shape == (466, 14, 2, 2)


def check_data(scope: Scope, printed: str) -> None:
    assert scope["train"].num_annotations == 4 and scope["held_out"].num_annotations == 1
    assert scope["dataset"] is not None and len(scope["annotations"]) == 100


def check_functions(scope: Scope, printed: str) -> None:
    assert scope["confusion"].grad[1].count_nonzero() == 0 and scope["confusion"].grad[0].count_nonzero() > 0
    public = set(crowdnal.functional.__all__) - {"Normalization", "Reduction"}
    table = "".join(re.findall(r"^\| (`.*?) \|", text_of("docs/functions.md"), flags=re.M))
    assert set(re.findall(r"`(\w+)`", table)) == public


def check_mixtures(scope: Scope, printed: str) -> None:
    """Every objective is in one row of the table, with what it does."""
    found: dict[str, tuple[str, str]] = {}
    for row in re.findall(r"^\| (`.*) \|$", text_of("docs/mixtures.md"), flags=re.M):
        names, terms, gold, _ = row.split(" | ")
        found |= dict.fromkeys(re.findall(r"`([\w-]+)`", names), (terms, gold))
    terms = {"labels": "each label", "targets": "targets", None: "refused"}
    made = {name: cls for name, cls in objectives.OBJECTIVES.items() if cls.__module__.startswith("crowdnal.")}
    kinds = {name: cls.cross_entropy_with for name, cls in made.items()} | {"cmm": "targets"}
    gold = {name: "held in every step" if cls.holds_known else "in the loss" for name, cls in made.items()}
    assert found == {name: (terms[kinds[name]], gold[name]) for name in made}


SMALL = {'"resnet50", pretrained=True': '"test_resnet"'}
SWAPS: dict[str, list[dict[str, str]]] = {  # a block each: no download, few epochs
    "docs/loops.md": [
        SMALL, {}, {}, {}, {}, {}, {}, {'"resnet18"': '"test_resnet"', "train, 20": "train, 2"}, {},
        {'"resnet18"': '"test_resnet"', "range(60)": "(9, 10)"},
    ],
    "docs/command.md": [{'"resnet50", epochs=2': '"test_resnet", image_size=32, workers=0, holdout=0.2, epochs=2'}],
}  # fmt: skip
GIVEN: dict[str, Callable[[], Scope]] = {
    "docs/loops.md": crowd,
    "docs/aggregation.md": answers,
    "docs/data.md": answers,
    "docs/command.md": photos,
    "docs/methods.md": judgements,
}


def check_contributing(scope: Scope, printed: str) -> None:
    annotations = simulation.simulate(torch.arange(60) % 3, simulation.symmetric_confusions(5, 3, 0.8), seed=0)
    logits = 9.0 * torch.eye(3)[torch.arange(60) % 3]
    none, some = (objectives.create("decayed-crowd-layer", num_classes=3, num_annotators=5, strength=s) for s in (0, 2))
    assert_close(some.loss(logits, annotations) - none.loss(logits, annotations), torch.tensor(30.0), rtol=1e-5)
    assert {"strength", "rank", "groups"} <= set(inspect.signature(type(some)).parameters)
    assert "strength" in str(type(some).__doc__) and "groups" in str(type(some).__doc__)


CHECKS: dict[str, tuple[int, Callable[[Scope, str], None]]] = {  # how many comments are values, and what else holds
    "CONTRIBUTING.md": (0, check_contributing),
    "docs/aggregation.md": (0, check_aggregation),
    "docs/command.md": (0, check_command),
    "docs/concepts.md": (2, check_concepts),
    "docs/data.md": (6, check_data),
    "docs/functions.md": (0, check_functions),
    "docs/loops.md": (1, check_loops),
    "docs/mixtures.md": (5, check_mixtures),
    "docs/methods.md": (0, check_tags),
}


@pytest.mark.parametrize("name", [name_of(p) for p in PAGES if p.name != "README.md" and blocks(p.read_text())])
def test_code_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks of a page one after the other, as a reader would run them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_registry, "_known", dict(_registry._known))  # what a page registers is gone afterwards
    torch.manual_seed(0)
    scope = {**GIVEN.get(name, dict)()}
    code = blocks(text_of(name))
    compared = sum(run(c, scope, s) for c, s in zip(code, SWAPS.get(name, [{}] * len(code)), strict=True))
    values, check = CHECKS.get(name, (0, lambda scope, printed: None))
    check(scope, capsys.readouterr().out)
    assert compared == values


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    found = re.findall(r"^#+ (.*)$", prose(page.read_text(encoding="utf-8")), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.is_relative_to(ROOT) and target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_and_names_exist(page: Path) -> None:
    """In `code` of the prose: paths from the root of the project, and dotted names of the package."""
    for code in re.findall(r"`([^`\n]+)`", prose(page.read_text(encoding="utf-8"))):
        for path in re.findall(rf"(?<![\w/.$])((?:{'|'.join(map(re.escape, TREES))})/[\w./*-]*)", code):
            assert any(ROOT.glob(path.rstrip("/."))), path
        for dotted in re.findall(r"(?<![\w.\"])crowdnal(?:\.\w+)+(?![\w/])", code):
            found: Any = crowdnal
            for part in dotted.split(".")[1:]:
                found = getattr(found, part, None) or importlib.import_module(f"{found.__name__}.{part}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_extras_and_variables_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    extras = tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]
    assert {name for names in re.findall(r"\.\[([\w,-]+)\]\"", text) for name in names.split(",")} <= set(extras)
    sources = [ROOT / "setup.py", ROOT / ".ci/run", *(p for t in TREES for p in (ROOT / t).rglob("*.[pch]*"))]
    sources = [p for p in sources if p.is_file() and p.suffix in ("", ".py", ".h", ".cuh") and p != Path(__file__)]
    known = "".join(source.read_text(encoding="utf-8") for source in sources)
    assert [name for name in re.findall(r"CROWDNAL_\w+", text) if name not in known] == []


def test_every_page_of_docs_is_linked_from_the_readme() -> None:
    linked = {link.partition("#")[0] for link in LINK.findall(text_of("README.md"))}
    linked |= {f"docs/{link}" for link in LINK.findall(text_of("CONTRIBUTING.md"))} | set(
        LINK.findall(text_of("CONTRIBUTING.md"))
    )
    assert {name_of(page) for page in (ROOT / "docs").glob("*.md")} <= linked


def test_options_of_methods_exist() -> None:
    """`CoNAL(mixing="logits" or "probabilities")`: an option of that name with these values, the default first."""
    cells = re.findall(r"^\| `[\w-]+` \| `(\w+)\((.+?)\)` \|", text_of("docs/methods.md"), flags=re.M)
    assert len(cells) > 10
    for name, options in cells:
        parameters = inspect.signature(getattr(objectives, name), eval_str=True).parameters
        for option, values in re.findall(r"(\w+)=(.+?)(?=, \w+=|$)", options):
            hint, texts = parameters[option].annotation, re.findall(r'"([^"]+)"', values)
            if get_origin(hint) is Literal:
                assert sorted(texts) == sorted(get_args(hint)), (name, option)
                assert texts[0] == parameters[option].default, (name, option)
            elif texts:
                assert set(texts) <= set(crowdnal.aggregation.AGGREGATORS), (name, option)
            else:
                assert str(parameters[option].default) == values, (name, option)


# What a project says of itself


def test_citation_and_changelog_know_the_version() -> None:
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert citation["cff-version"] == "1.2.0" and citation["version"] == crowdnal.__version__
    assert {"message", "title", "authors"} <= set(citation) and citation["license"] == "Apache-2.0"
    assert f"## [{crowdnal.__version__}]" in text_of("CHANGELOG.md")
    urls = tomllib.loads(text_of("pyproject.toml"))["project"]["urls"]
    assert citation["repository-code"] == urls["Homepage"] and {"Issues", "Changelog", "Documentation"} <= set(urls)


def test_pre_commit_checks_what_ci_checks() -> None:
    config = yaml.safe_load(text_of(".pre-commit-config.yaml"))
    assert [repo["repo"] for repo in config["repos"]] == ["local"]  # nothing is fetched
    hooks = [hook["entry"] for hook in config["repos"][0]["hooks"]]
    checked = re.findall(r'^    stage "lint: \w+" (.*)$', text_of(".ci/run"), flags=re.M)
    assert checked
    for command in checked:
        assert command.removesuffix(" .") in hooks, command


def test_source_archive_has_the_pages_and_what_their_tests_read(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns(".git", "__pycache__", "*.so", "*.egg-info", ".*_cache", ".hypothesis", "build")
    shutil.copytree(ROOT, tree, ignore=ignored)
    code = "import sys; sys.path.insert(0, '_build'); import backend; print(backend.build_sdist(sys.argv[1]))"
    subprocess.run([sys.executable, "-P", "-c", code, tmp_path], cwd=tree, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    needed = {name_of(page) for page in PAGES} | {"CITATION.cff", ".pre-commit-config.yaml", ".ci/run"}
    assert names >= needed | {name_of(path) for path in (ROOT / "benchmarks").rglob("*.py")}
