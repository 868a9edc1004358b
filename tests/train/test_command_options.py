"""An option of the command is declared once: what the parser, the help, the tables and a resumed run make of it."""

from __future__ import annotations

import dataclasses
import html
import json
import pickle
import re
import sys
import types
from pathlib import Path

import pytest
from support.small_run import CLASSES, N, arguments, config, frozen, go, read, table, write

from crowdnal import cli
from crowdnal.objectives import OBJECTIVES
from crowdnal.train import InputError, TrainConfig
from crowdnal.train.config import DEFAULTS, GROUPS, OPTIONS, ByMode, default_in_words, flag, in_words, options_table
from crowdnal.train.options import (
    description,
    methods,
    objective_class,
    option_help,
    option_types,
    parse_options,
    plain,
    value_words,
)

EVERYTHING = TrainConfig(
    images=Path("a b"), annotations=Path("a.csv"), out=Path("none-1.0"), model="m", objective="dl-em",
    compare="nothing", options=("decay=0.5",), format="dense", items=Path("i.txt"), task_column="t", worker_column="w",
    label_column="l",
    probabilities=("p", "q"), weight_column="c", last="row", unsure=("?",), separator=";",
    columns=("task", "w", "l"), encoding="latin-1", missing=("2.0", "no, none"), classes=("x", "y z"),
    weights="w.pth", pretrained=True, image_size=32, augment="none",
    freeze_backbone=True, feature_cache=Path("c"), epochs=2, batch_size=3, lr=1.25e-05, objective_lr=1 / 3,
    weight_decay=0.5, optimizer="sgd", drop_rate=0.25, schedule="cosine", cross_fit=4, holdout=0.125,
    test_images=Path("t"), test_labels=Path("t.csv"), test_items=Path("t.txt"), truth=Path("r.csv"),
    gold=Path("g.csv"), seed=7, workers=1, threads=2,
    device="cpu", amp=True, log="tensorboard",
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write(tmp_path_factory.mktemp("small"))


def helped(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_a_prior_of_the_confusions_is_a_word_or_a_number():
    for text, value in (("none", None), ("3", 3.0), ("crowd", "crowd")):
        assert parse_options(OBJECTIVES["crowd-layer"], (f"confusion_prior={text}",)) == {"confusion_prior": value}
        assert parse_options(OBJECTIVES["dl-em"], (f"confusion_prior={text}",)) == {"confusion_prior": value}
    assert "gold" not in option_types(OBJECTIVES["dl-em"])  # a tensor alone is no word


def test_class_weights_are_numbers_with_commas_between():
    given = parse_options(OBJECTIVES["trace"], ("class_weight=0.5,2, 1", "label_smoothing=0.1", "focal=2"))
    assert given == {"class_weight": [0.5, 2.0, 1.0], "label_smoothing": 0.1, "focal": 2.0}
    assert value_words(given["class_weight"]) == "0.5,2.0,1.0"
    assert parse_options(OBJECTIVES["trace"], ("class_weight=none",)) == {"class_weight": None}
    with pytest.raises(InputError, match="class_weight='a,b' must be numbers with commas between or none"):
        parse_options(OBJECTIVES["trace"], ("class_weight=a,b",))
    assert "class_weight" not in option_types(OBJECTIVES["max-mig"]) | option_types(OBJECTIVES["lia"])


def test_every_option_comes_back_from_its_command(monkeypatch):
    assert not [name for name in OPTIONS if getattr(EVERYTHING, name) == DEFAULTS[name]]  # none is left out
    seen = []
    monkeypatch.setattr(cli, "run", lambda given, **_: seen.append(given))
    assert cli.main(arguments(EVERYTHING)) == 0
    assert seen == [EVERYTHING]
    assert pickle.loads(pickle.dumps(EVERYTHING)) == EVERYTHING
    assert json.loads(json.dumps(EVERYTHING.to_dict()))["classes"] == ["x", "y z"]


def test_help_has_every_option_in_its_group_with_its_default(capsys):
    text = " ".join(helped(capsys, "train").split())
    places = [text.index(f" {group}: ") for group in GROUPS] + [text.index(" examples: ")]
    for name, option in OPTIONS.items():
        group = list(GROUPS).index(option.group)
        part = text[places[group] : places[group + 1]].replace("test- items", "test-items")
        default = default_in_words(name)
        assert f" {flag(name)} " in part
        assert f"{option.help} (default: {default})" if default else option.help in part
    assert "(default: 40 / 20 / 60)" in text and "(default: --lr)" in text and "--seed N" in text


@pytest.mark.parametrize(
    ("mode", "changes"), [(0, {"freeze_backbone": True, "pretrained": True}), (1, {"pretrained": True}), (2, {})]
)
def test_defaults_in_the_help_are_those_that_a_run_takes(root, tmp_path, mode, changes):
    given = dataclasses.replace(config(root, tmp_path, epochs=None, batch_size=None), **changes)
    resolved = given.resolved()
    modal = [name for name, option in OPTIONS.items() if isinstance(option.fill, ByMode)]
    assert len(modal) == 7
    for name in modal:
        shown = default_in_words(name).split(" / ")
        assert shown[mode if len(shown) > 1 else 0] == in_words(getattr(resolved, name))
    assert resolved.objective_lr == resolved.lr


def test_table_has_a_row_for_every_option():
    rows = re.findall(r"^\| `(--[\w-]+)` \| (.*?) \| (.*) \|$", options_table(), flags=re.M)
    assert sorted(row[0] for row in rows) == sorted(map(flag, OPTIONS))
    assert [row[0] for row in rows if row[1] == "required"] == ["--images", "--annotations", "--model", "--out"]
    assert all(row[2] for row in rows)


def test_only_free_options_may_differ_in_a_resumed_run():
    other = {name: "other" for name in OPTIONS}
    free = {name for name in OPTIONS if EVERYTHING.difference({**EVERYTHING.to_dict(), name: other[name]}) is None}
    assert free == {"out", "compare", "workers", "feature_cache", "log"}
    assert EVERYTHING.difference({**EVERYTHING.to_dict(), "seed": 0}) == "--seed: it was 0, now 7"


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"threads": 100000}, "--threads 100000 must be 1 to 1024"),
        ({"image_size": 100000}, "--image-size 100000 must be 1 to 16384"),
        ({"device": "meta"}, "--device 'meta' cannot be used: it holds no numbers"),
        ({"weights": ""}, "--weights '' must not be empty"),
        ({"format": "csv"}, "--format 'csv' is unknown: use one of auto, long, dense, appen, .*, zooniverse$"),
        ({"weight_decay": float("nan")}, "--weight-decay nan must be 0 or more"),
        ({"log": "paper"}, "--log 'paper' is unknown: use one of csv, tensorboard"),
        ({"options": ("reduction=none",)}, r"--option reduction='none' must be one of mean\|sum\|item_mean\|per_item"),
        (
            {"objective": "crowd-layer", "options": ("sparse_grad=true",)},
            "--option 'sparse_grad' is unknown to crowd-layer: it takes variant",
        ),
        ({"objective": "dl-aggregate", "options": ("method=kos",)}, "KOS"),
    ],
)
def test_values_that_no_run_can_have(root, tmp_path, words, match):
    if "KOS" in match:
        pytest.importorskip("crowdkit")
    with pytest.raises(InputError, match=match):
        go(frozen(root, tmp_path / "run", **words))
    assert not list(tmp_path.glob("run/*.json"))


def test_report_shows_what_decides_the_training(root, tmp_path):
    run = go(frozen(root, tmp_path / "run", epochs=1, options=("variant=VB", "class_weight=1,2,1", "focal=2"), seed=3))
    page = (run.out / "report.html").read_text()
    rows = dict(re.findall(r"<tr><td>([\w ]+)</td><td>([^<]*)</td></tr>", page))
    assert html.unescape(rows["options"]) == 'variant=VB,"class_weight=1,2,1",focal=2'
    assert rows["seed"] == "3" and rows["image size"] == "32"
    assert rows["objective lr"] == in_words(run.metrics["arguments"]["objective_lr"]) and rows["epochs"] == "1"
    assert not {"weights", "feature cache", "out", "workers"} & set(rows)


# An objective's options


@pytest.mark.parametrize("name", OBJECTIVES)
def test_defaults_that_are_shown_are_options(name):
    cls = OBJECTIVES[name]
    shown = dict(re.findall(r"^  (\w+)=(\S+)  \(", option_help(cls), flags=re.M))
    assert shown.keys() == option_types(cls).keys()
    values = parse_options(cls, tuple(f"{key}={value}" for key, value in shown.items()))
    made, default = cls(3, 4, **values), cls(3, 4)
    assert repr(made) == repr(default)
    assert {key: value_words(value) for key, value in values.items()} == shown
    assert not {"num_classes", "num_annotators", "num_labels", "sparse_grad", "groups", "gold"} & shown.keys()


@pytest.mark.parametrize("name", methods())
def test_objectives_are_told_in_plain_text(capsys, name):
    assert cli.main(["objectives", name]) == 0
    text, cls = capsys.readouterr().out, objective_class(name)
    assert text.startswith(f"{name}\n") and f"crowdnal.{cls.__name__}\n" in text
    assert not re.search(r"`|:\w+:|::$|^=|\*\*", text, flags=re.M), text
    lines = option_help(cls).splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):  # each option is explained, here or above
        option = re.match(r"  (\w+)=", line)
        assert not option or after.startswith("      ") or f"{option[1]}=" in description(cls)


def test_objectives_name_their_options_where_they_are_asked_for(capsys):
    for words in (("train", "--objective", "dl-em"), ("train",)):
        text = helped(capsys, *words)
        assert text.rstrip().endswith(option_help(OBJECTIVES["dl-em" if len(words) > 1 else "feature-em"]))
    with pytest.raises(SystemExit):
        cli.main(["train", "--help", "--objective", "dl-em"])  # in either order
    assert "decay=0.99  (a number)" in capsys.readouterr().out
    assert cli.main(["objectives", "nothing"]) == 2
    assert "NAME 'nothing' is unknown: use one of ccc, cmm, " in capsys.readouterr().err


def test_link_and_source_are_told(capsys):
    assert cli.main(["objectives"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"^crowd-layer  .*\n +softmax\(p W_r\); Rodrigues & Pereira 2018$", listed, flags=re.M)
    assert re.search(r"^majority-vote  .*\n +[^;\n]+$", listed, flags=re.M)  # it has no source
    assert cli.main(["objectives", "crowd-layer"]) == 0
    assert "link    softmax(p W_r)\nsource  Rodrigues & Pereira 2018\n" in capsys.readouterr().out


def test_markup_becomes_text():
    assert plain("See :class:`~a.b.C`, :func:`d.e` and ``f(*x, **y)``, **never** *this*::") == (
        "See C, d.e and f(*x, **y), never this:"
    )
    assert plain("=== ==\na   b\n=== ==\n``p``     1\n``p W``   2\n") == "a   b\np         1\np W       2\n"


# Dry runs and logs


def test_dry_run_writes_nothing(root, tmp_path, capsys):
    words = arguments(frozen(root, tmp_path / "a" / "run", objective="trace", options=("trace-weight=0.5",), seed=11))
    assert cli.main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "108 labels by 5 annotators on 36 of 39 images, 3 classes" in said
    told = {"trace_weight=0.5", "normalization=softplus", "warmup_epochs=0", "scope=all", "rank=none", "reduction=mean"}
    told |= {"confusion_prior=crowd", "class_weight=none", "label_smoothing=0.0", "focal=0.0"}
    assert told == set(re.search("^trace: (.*)$", said, flags=re.M)[1].split())
    assert "epochs 3, batch size 8, optimizer adam, lr 0.02, objective lr 0.02" in said and "seed 11" in said
    assert "nothing was written" in said and not list(tmp_path.iterdir())
    for change, match in (
        ({"holdout": 0.001}, "leaves one side empty"),
        ({"model": "deit_tiny_distilled_patch16_224"}, "is not one classifier on pre-logits features"),
        ({"optimizer": "addam"}, "unknown to timm"),
    ):
        assert cli.main([*arguments(frozen(root, tmp_path / "run", **change)), "--dry-run"]) == 2
        assert match in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_dry_run_of_a_resumed_run(root, tmp_path, capsys):
    settings = frozen(root, tmp_path / "run", epochs=1)
    go(settings)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert cli.main([*arguments(settings), "--resume", "--dry-run"]) == 0
    assert "would go on with the run in" in capsys.readouterr().out
    assert cli.main([*arguments(settings), "--dry-run"]) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


class Writer:
    """What `torch.utils.tensorboard.SummaryWriter` is to a run."""

    made: list[Writer] = []

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step, self.rows, self.closed = folder, purge_step, {}, False
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.rows.setdefault(step, {})[name] = value

    def close(self) -> None:
        self.closed = True


@pytest.mark.slow
def test_tensorboard_gets_the_rows_of_the_history(root, tmp_path, monkeypatch):
    monkeypatch.setattr(Writer, "made", [])
    module = types.SimpleNamespace(SummaryWriter=Writer)
    for name in ("tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, module)
    settings = frozen(root, tmp_path / "run", holdout=0.2, log="tensorboard")
    run = go(settings)
    go(dataclasses.replace(settings, log="csv"), resume=True)  # may be switched off
    go(settings, resume=True)  # nothing is left to do
    first, last = Writer.made
    assert (
        first.folder == str(run.out / "tensorboard") and first.closed and (first.purge_step, last.purge_step) == (1, 4)
    )
    history = read(run.out / "history.csv").set_index("epoch")
    assert list(first.rows) == list(history.index) == [1, 2, 3] and not last.rows
    for epoch, row in first.rows.items():
        assert row == pytest.approx(history.loc[epoch].to_dict())


def test_tensorboard_itself(root, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = go(frozen(root, tmp_path / "run", log="tensorboard"))
    events = accumulator.EventAccumulator(str(run.out / "tensorboard")).Reload()
    losses = [event.value for event in events.Scalars("train_loss")]
    assert losses == pytest.approx(read(run.out / "history.csv").train_loss.tolist(), rel=1e-6)


def test_tensorboard_that_is_not_there(root, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert cli.main(arguments(frozen(root, tmp_path / "run", log="tensorboard"))) == 2
    assert 'pip install "crowdnal[tensorboard]"' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.quick(1)
@pytest.mark.parametrize("objective", ["crowd-layer", "dl-em"])
def test_gold_classes_are_trained_on(tmp_path: Path, objective: str) -> None:
    """Those of images without labels too; what is known is not estimated."""
    root = write(tmp_path)
    names = [f"i{i:02d}" for i in (*range(0, 9), N, N + 1)]
    known = [(name, CLASSES[(int(name[1:]) + 1) % 3]) for name in names]  # none of them is the true one
    gold = table(root / "gold.csv", ("task", "label"), known)
    told = go(frozen(root, tmp_path / "told", gold=gold, objective=objective))
    rows = {Path(task).stem: i for i, task in enumerate(told.data.images.ids)}
    at = [rows[name] for name in names]
    found = told.estimates.posterior[at].argmax(1)
    assert [CLASSES[k] for k in found.tolist()] == [label for _, label in known]
    assert told.metrics["arguments"]["gold"] == str(gold)
    plain = go(frozen(root, tmp_path / "plain", objective=objective))
    assert plain.estimates.posterior[at].argmax(1).tolist() != found.tolist()
