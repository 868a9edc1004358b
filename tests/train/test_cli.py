"""The command line: what it says, and what it says when something is wrong."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from rich.console import Console
from support.small_run import arguments, config, frozen, go, read, same_weights, table, write

import crowdnal
from crowdnal import cli
from crowdnal.ccc import CCC
from crowdnal.objectives import OBJECTIVES, CrowdLayer, TraceRegularized
from crowdnal.train import InputError, demo
from crowdnal.train.options import parse_options, plain
from crowdnal.train.progress import Reporter


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write(tmp_path_factory.mktemp("small"))


def check_fails(capsys, words: list[str], *matches: str) -> None:
    assert cli.main(words) == 2
    output = capsys.readouterr()
    lines = output.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("crowdnal: error: "), output.err
    for match in matches:
        assert re.search(match, lines[0]), lines[0]


def test_train(root, tmp_path, capsys):
    out = tmp_path / "my run"
    words = arguments(frozen(root, out, objective="crowd-layer", options=("variant=VB",)))
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "108 labels by 5 annotators on 36 of 39 images, 3 classes" in said
    assert "epoch 3/3  loss" in said and "features 39/39" in said
    assert re.search(r"test accuracy [01]\.\d{4} \(last epoch, 12 images\)", said)
    for name in ("model.safetensors", "annotators.csv", "labels.csv", "history.csv", "metrics.json", "report.html"):
        assert str(out / name) in said and (out / name).is_file()
    assert len(read(out / "labels.csv")) == 39
    check_fails(capsys, words, "holds a run already: add --resume")
    assert cli.main([*words, "--resume", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    check_fails(capsys, [*words, "--resume", "--lr", "0.5"], "--lr: it was 0.02, now 0.5")


def test_command_of_a_configuration_is_that_configuration(root, tmp_path, monkeypatch):
    settings = frozen(
        root, tmp_path / "a b", options=("variant=VW",), classes=("blue", "green", "red"), holdout=0.25, amp=True
    )
    seen = []
    monkeypatch.setattr(cli, "run", lambda given, **_: seen.append(given))
    assert cli.main(arguments(settings)) == 0
    assert seen == [settings]


@pytest.mark.parametrize(
    ("changes", "matches"),
    [
        ({"model": "test_resnett"}, ["--model 'test_resnett' is unknown to timm", "near matches: test_resnet"]),
        ({"objective": "crowdlayer"}, ["--objective 'crowdlayer' is unknown", "crowd-layer.*majority-vote.*trace"]),
        (
            {"objective": "crowd-layer", "options": ("variant=XX",)},
            [r"--option variant='XX' must be one of MW\|VW\|VB\|VW\+B"],
        ),
        (
            {"objective": "crowd-layer", "options": ("size=3",)},
            ["--option 'size' is unknown to crowd-layer", "variant"],
        ),
        ({"options": ("variant",)}, ["must be KEY=VALUE"]),
        ({"optimizer": "addam"}, ["--optimizer 'addam' is unknown to timm", "adam"]),
        ({"weights": "no-such-package"}, ["--weights 'no-such-package' is neither a file nor an installed package"]),
        ({"weights": "w.pth", "pretrained": True}, ["exclude each other"]),
        ({"device": "cuda:99"}, ["--device 'cuda:99' cannot be used"]),
        ({"device": "abacus"}, ["--device 'abacus' cannot be used"]),
        ({"epochs": 0}, ["--epochs 0 must be 1 or more"]),
        ({"lr": -1.0}, ["--lr -1.0 must be above 0"]),
        ({"holdout": 1.0}, ["--holdout 1.0 must be at least 0 and below 1"]),
        ({"holdout": 0.001}, ["--holdout 0.001 of 108 labels leaves one side empty"]),
        ({"test_labels": None}, ["--test-images and --test-labels go together"]),
        ({"images": "nowhere"}, ["--images nowhere is not a folder"]),
        ({"annotations": "nowhere.csv"}, ["--annotations nowhere.csv does not exist"]),
        ({"classes": ("red", "green")}, ["line \\d+, column 'label'.*'blue' is not in --classes"]),
        ({"label_column": "answer"}, ["has no column 'answer', only.*--label-column"]),
    ],
)
def test_mistakes(root, tmp_path, capsys, changes, matches):
    check_fails(capsys, arguments(config(root, tmp_path / "run", **changes)), *matches)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_task_without_image(root, tmp_path, capsys):
    file = table(tmp_path / "a.csv", ("task", "worker", "label"), [("i00", "a", "x"), ("i011", "a", "y")])
    words = arguments(config(root, tmp_path / "run", annotations=file, truth=None))
    check_fails(capsys, words, r"a\.csv, line 3, .*no image 'i011'", "near matches: .*i01")


def test_matrix_without_names(root, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("0 1 -1\n1 -1 0\n")
    given = {"annotations": tmp_path / "a.txt", "truth": None}
    check_fails(capsys, arguments(config(root, tmp_path / "run", **given)), '--format "dense" if it is a matrix')
    words = arguments(config(root, tmp_path / "run", **given, format="dense"))
    check_fails(capsys, words, "--items")


def test_unreadable_image_in_a_worker(root, tmp_path, capsys):
    images = tmp_path / "images"
    images.mkdir()
    for name in "abc":
        (images / f"{name}.png").write_bytes(b"nothing")
    file = table(tmp_path / "a.csv", ("task", "worker", "label"), [("a", "w", "x"), ("b", "w", "y")])
    settings = frozen(
        root, tmp_path / "run", images=images, annotations=file, workers=1, truth=None, test_images=None,
        test_labels=None,
    )  # fmt: skip
    check_fails(capsys, arguments(settings), r"a\.png cannot be read as an image .*: mend, convert or remove it$")


def test_package_that_is_not_there(root, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    check_fails(capsys, arguments(config(root, tmp_path / "run")), re.escape('pip install "crowdnal[train]"'))


def test_options_are_typed():
    assert parse_options(TraceRegularized, ("trace-weight=0.5", "warmup_epochs=3", "scope=batch")) == {
        "trace_weight": 0.5,
        "warmup_epochs": 3,
        "scope": "batch",
    }
    with pytest.raises(InputError, match="--option warmup_epochs='x' must be an integer"):
        parse_options(TraceRegularized, ("warmup_epochs=x",))
    assert parse_options(OBJECTIVES["majority-vote"], ("soft=yes",)) == {"soft": True}
    with pytest.raises(InputError, match=r"soft='2' must be true\|false"):
        parse_options(OBJECTIVES["majority-vote"], ("soft=2",))


def test_interrupted(root, tmp_path, capsys, monkeypatch):
    words = arguments(config(root, tmp_path / "run", objective="crowd-layer"))
    with monkeypatch.context() as patch:
        patch.setattr(CrowdLayer, "_loss", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        assert cli.main(words) == 130
    command = capsys.readouterr().err.strip().partition("go on with: crowdnal ")[2]
    assert command.endswith(" --resume") and command.split()[0] == "train"
    assert cli.main(command.split()) == 0


@pytest.mark.slow
def test_killed_in_an_epoch(root, tmp_path):
    settings = config(root, tmp_path / "run", epochs=15, holdout=0.1, schedule="cosine")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "crowdnal", *arguments(settings)], env=environment, stdout=subprocess.DEVNULL
    )
    checkpoint, limit = settings.out / "checkpoint.pt", time.monotonic() + 120
    try:
        while not checkpoint.exists() and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.01)
        time.sleep(0.3)
    finally:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    done = torch.load(checkpoint, weights_only=True)["progress"]["epoch"]
    assert 0 < done < 15 and not (settings.out / "metrics.json").exists()
    (settings.out / ".checkpoint.pt.1.crowdnal.tmp").write_bytes(b"half")  # as if killed while writing
    assert go(settings, resume=True).metrics["epochs"] == 15
    whole = go(config(root, tmp_path / "whole", epochs=15, holdout=0.1, schedule="cosine"))
    assert same_weights(settings.out, whole.out)
    assert not list(settings.out.glob(".*"))  # no half-written file is left


def test_progress_on_a_terminal():
    stream = io.StringIO()
    reporter = Reporter(console=Console(file=stream, force_terminal=True, width=100, highlight=False))
    with reporter.track("epoch", 4, done=1) as track:
        for loss in (0.75, 0.5, 0.25):
            track.advance(1, f"loss {loss}")
    assert "epoch" in stream.getvalue() and "4/4" in stream.getvalue() and "loss 0.25" in stream.getvalue()
    reporter.say("[bold]a path[/bold]")
    assert "[bold]a path[/bold]" in stream.getvalue()


def test_help(capsys):
    for words in (["--help"], ["train", "--help"], ["demo", "--help"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert stop.value.code == 0
    text = capsys.readouterr().out
    for heading in ("data:", "test set:", "model:", "objective:", "training:", "running:", "examples:"):
        assert f"\n{heading}" in text
    assert cli.main([]) == 0 and "commands:" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"crowdnal {crowdnal.__version__}\n"


def test_missing_arguments(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--images", "x"])
    assert stop.value.code == 2 and "--annotations" in capsys.readouterr().err


def test_objectives(capsys):
    assert cli.main(["objectives"]) == 0
    listed, advice = capsys.readouterr().out.split("\n\n")
    lines, links = listed.splitlines()[::2], listed.splitlines()[1::2]
    classes = dict(sorted({**OBJECTIVES, "ccc": CCC}.items()))
    assert [line.split()[0] for line in lines] == list(classes) and all(len(line) > 40 for line in lines)
    told = [plain("; ".join(filter(None, (cls.link, cls.source)))) for cls in classes.values()]
    assert [line.strip() for line in links] == told
    assert "`" not in listed and all(name in OBJECTIVES for name in re.findall(r"\b[a-z]+(?:-[a-z]+)+\b", advice))


@pytest.mark.slow
def test_demo_tells_what_it_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "_TRAIN_ITEMS", 150)
    monkeypatch.setattr(demo, "_TEST_ITEMS", 60)
    monkeypatch.setattr(demo, "_EPOCHS", 2)
    assert cli.main(["demo", "--out", str(tmp_path), "--seed", "3"]) == 0
    said = capsys.readouterr().out
    for name in demo.OBJECTIVES:
        found = re.search(rf"{name} +│ +([\d.]+) │ +([\d.]+) │ +(-?[\d.]+|nan)", said)
        assert found, said
        table = read(tmp_path / name / "history.csv")
        assert float(found[1]) == pytest.approx(float(table.test_accuracy.iloc[-1]), abs=6e-4)
    truth = read(tmp_path / "truth.csv").set_index("task").label
    labels = read(tmp_path / demo.OBJECTIVES[-1] / "labels.csv").set_index("item").label
    assert float(found[2]) == pytest.approx((labels.astype(int) == truth.astype(int)[labels.index]).mean(), abs=6e-4)
    assert len(list((tmp_path / "train").iterdir())) == 150 and len(list((tmp_path / "test").iterdir())) == 60
    # the printed commands are the ones that ran
    assert f"crowdnal train --images {tmp_path / 'train'}" in said
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
