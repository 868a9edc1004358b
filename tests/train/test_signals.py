"""SIGTERM while the command trains: as an interruption, one line that says how to go on, and nothing lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.small_run import arguments, config, frozen, same_weights, write

from crowdnal import cli
from crowdnal.objectives import CrowdLayer


@pytest.mark.slow
def test_terminated(tmp_path, capsys, monkeypatch):
    root = write(tmp_path / "data")
    words, calls, loss = arguments(frozen(root, tmp_path / "run")), [], CrowdLayer._loss
    before = signal.getsignal(signal.SIGTERM)

    def terminate(*given):
        calls.append(1)
        if len(calls) == 8:  # in the second epoch
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(*given)

    with monkeypatch.context() as patch:
        patch.setattr(CrowdLayer, "_loss", terminate)
        assert cli.main(words) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    command = capsys.readouterr().err.strip().partition("go on with: crowdnal ")[2]
    assert command.endswith(" --resume") and cli.main(command.split()) == 0
    assert cli.main(arguments(frozen(root, tmp_path / "whole"))) == 0
    assert same_weights(tmp_path / "run", tmp_path / "whole")


def read_only(place: Path) -> list[Path]:
    """A folder to be made and one that is there, where not even root writes."""
    if os.geteuid() == 0:
        return [Path("/sys/crowdnal-run"), Path("/sys/kernel")]
    folder = place / "closed"
    (folder / "there").mkdir(parents=True)
    for path in (folder / "there", folder):
        path.chmod(0o555)
    return [folder / "run", folder / "there"]


def test_read_only_folder(tmp_path, capsys):
    """One line that names it, whether the run's folder is to be made there or is there."""
    root = write(tmp_path / "data")
    for out in read_only(tmp_path):
        assert cli.main(arguments(config(root, out))) == 2
        line = capsys.readouterr().err
        assert str(out) in line and "Traceback" not in line and not (out / "run.json").exists()


def test_names_of_images_that_are_no_utf8(tmp_path, capsys):
    """Written escaped; the command died after training."""
    root = write(tmp_path / "data")
    image = next((root / "train").rglob("*.png"))
    strange = os.fsencode(image.parent) + b"/caf\xe9.png"
    os.link(image, strange)
    assert cli.main(arguments(frozen(root, tmp_path / "run", epochs=1))) == 0
    assert r"caf\udce9" in (tmp_path / "run" / "labels.csv").read_text(encoding="utf-8")
