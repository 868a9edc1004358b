"""What goes wrong around a run: damaged and foreign files, full disks, two runs in one folder, changed inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import shutil

import matplotlib
import numpy as np
import pytest
import timm
import torch
from support.small_run import CLASSES, arguments, config, frozen, go, picture, same_weights, table, write

from crowdnal import cli
from crowdnal.train import InputError, figures, files, session


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def finished(root, tmp_path_factory):
    settings = frozen(root, tmp_path_factory.mktemp("finished") / "run", epochs=1, holdout=0.2)
    go(settings)
    return settings


@pytest.fixture
def begun(finished, tmp_path):
    """A copy of a run of one epoch, to be resumed."""
    shutil.copytree(finished.out, tmp_path / "run")
    return dataclasses.replace(finished, out=tmp_path / "run")


def fails(capsys, words: list[str]) -> str:
    """The one line that says what is wrong."""
    assert cli.main(words) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("crowdnal: error: ")
    return lines[0]


# Names


def test_dollars_are_no_mathematics(root, tmp_path):
    prices = dict(zip(CLASSES, ("$", "$$", "$^$"), strict=True))
    rows = [line.split(",") for line in (root / "annotations.csv").read_text().splitlines()[1:]]
    rows = [(task, worker.replace("ann", r"$\frac$"), prices[label]) for task, worker, label in rows if label]
    annotations = table(tmp_path / "a.csv", ("task", "worker", "label"), rows)
    untested = {"truth": None, "test_images": None, "test_labels": None}
    run = go(frozen(root, tmp_path / "run", annotations=annotations, **untested))
    assert r"$\frac$" in (run.out / "report.html").read_text()


def test_numbers_of_labels_on_a_logarithmic_axis_are_numbers():
    values = torch.rand(4, dtype=torch.float64)
    with matplotlib.rc_context(figures._STYLE):
        figure = figures.reliability.__wrapped__(torch.tensor([1, 30, 2000, 9000]), values, values)
        figure.canvas.draw()
        names = [label.get_text() for label in figure.axes[0].get_xticklabels(which="both")]
    assert {"10", "100", "1,000"} <= set(names) and not any("$" in name for name in names)


# Files of a run


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("checkpoint.pt", b""),
        ("checkpoint.pt", b"garbage" * 99),
        ("checkpoint.pt", 0.5),
        ("checkpoint.pt", {}),
        ("checkpoint.pt", {"model": {}, "optimizers": [], "progress": {}}),
        ("checkpoint-selected.pt", b"garbage"),
        ("run.json", 0.1),
        ("run.json", b"{}"),
        ("run.json", b"[]"),
    ],
)
def test_damaged_files_are_named(begun, capsys, name, content):
    path = begun.out / name
    if isinstance(content, float):
        content = path.read_bytes()[: int(content * path.stat().st_size)]
    if isinstance(content, dict):
        torch.save(content, path)
    else:
        path.write_bytes(content)
    line = fails(capsys, [*arguments(begun), "--resume"])
    assert f"{path} is damaged (" in line and ("delete it" in line or "in another folder" in line)


@pytest.mark.slow
def test_deleted_checkpoint_begins_again(begun):
    before = (begun.out / "model.safetensors").read_bytes()
    (begun.out / "checkpoint.pt").write_bytes(b"garbage")
    with pytest.raises(InputError, match="delete it, and --resume begins with the first epoch"):
        go(begun, resume=True)
    (begun.out / "checkpoint.pt").unlink()
    go(begun, resume=True)
    assert (begun.out / "model.safetensors").read_bytes() == before


@pytest.mark.slow
def test_only_own_leftovers_are_removed(begun):
    mine = [begun.out / "mine" / "deep" / ".notes.tmp", begun.out / ".cache.tmp" / "x", begun.out / ".a.1.tmp"]
    nested = begun.out / "other run" / ".checkpoint.pt.1.crowdnal.tmp"  # of a run that may be at work
    left = [begun.out / ".checkpoint.pt.1.crowdnal.tmp", begun.out / "features" / ".f.npy.1.crowdnal.tmp"]
    for path in (*mine, nested, *left):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    go(begun, resume=True)
    assert all(path.read_text() == "precious" for path in (*mine, nested))
    assert not any(path.exists() for path in left)


@contextlib.contextmanager
def limited(size: int):
    """No file may become larger, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "make", "name"),
    [(2000, frozen, "features/"), (300_000, config, "checkpoint.pt"), (300_000, frozen, "model.safetensors")],
)
def test_full_disk_is_named_and_survived(root, tmp_path, capsys, size, make, name):
    settings = make(root, tmp_path / "run", epochs=1)
    with limited(size):
        line = fails(capsys, [*arguments(settings), "--quiet"])
    assert f"{tmp_path / 'run'}/{name}" in line and "could not be written (" in line
    assert not list((tmp_path / "run").rglob(".*.crowdnal.tmp"))
    go(settings, resume=True)
    assert same_weights(settings.out, go(make(root, tmp_path / "whole", epochs=1)).out)


# Two runs


@pytest.mark.slow
def test_folder_in_use(begun, root, tmp_path, capsys):
    before = {path: path.read_bytes() for path in begun.out.rglob("*") if path.is_file()}
    with files.locked(begun.out):
        assert "is in use by another run" in fails(capsys, [*arguments(begun), "--resume"])
    assert before == {path: path.read_bytes() for path in begun.out.rglob("*") if path.is_file()}
    go(begun, resume=True)
    (begun.out / ".lock").touch()  # of a run that was killed
    go(begun, resume=True)
    assert not (begun.out / ".lock").exists()
    with files.locked(tmp_path / "new"):
        assert "is in use by another run" in fails(capsys, arguments(frozen(root, tmp_path / "new")))


@pytest.mark.slow
def test_two_runs_begun_at_once(root, tmp_path, monkeypatch):
    """The other one begins and ends after this one found the folder free, and before it writes there."""
    settings, create, ends = frozen(root, tmp_path / "run", epochs=1), session.create_model, []

    def other_begins(*arguments):
        if not ends:
            ends.append(None)
            ends.append(go(dataclasses.replace(settings, seed=7)))
        return create(*arguments)

    monkeypatch.setattr(session, "create_model", other_begins)
    with pytest.raises(InputError, match="holds a run already"):
        go(settings)
    assert ends[1].metrics["arguments"]["seed"] == 7
    go(dataclasses.replace(settings, seed=7), resume=True)  # it is whole


# Inputs that change between a run and its resumption


@pytest.mark.slow
def test_other_weights_are_not_resumed(root, tmp_path):
    def save(seed: int) -> None:
        torch.manual_seed(seed)
        torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "w.pth")

    save(1)
    settings = frozen(root, tmp_path / "run", epochs=1, weights=str(tmp_path / "w.pth"))
    go(settings)
    go(settings, resume=True)
    save(2)
    with pytest.raises(InputError, match=r"--resume: the weights of the model changed since .*run was begun"):
        go(settings, resume=True)


@pytest.mark.slow
def test_other_images_are_not_resumed(tmp_path):
    settings = frozen(write(tmp_path), tmp_path / "run", epochs=1)
    go(settings)
    for part in ("test", "train"):
        image = sorted((tmp_path / part).rglob("*.png"))[0]
        before = image.read_bytes()
        picture(image, "red", np.random.default_rng(5))
        with pytest.raises(InputError, match="--resume: the images changed since"):
            go(settings, resume=True)
        image.write_bytes(before)
        os.utime(image, (1, 1))
    go(settings, resume=True)  # a copy of the same content is no change
