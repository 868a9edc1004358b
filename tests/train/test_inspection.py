"""``crowdnal inspect``: a file summed up in the terminal, as JSON and as a picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from crowdnal import cli
from crowdnal.train import figures

TEXT = "image;worker;label\na;u;x\na;v;y\nb;u;x\nb;v;\nb;w;skip\nc;w;N/A\nc;u;x\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "answers.csv").write_text(TEXT)
    return tmp_path / "answers.csv"


def test_json_says_what_was_read(file: Path, capsys, tmp_path: Path) -> None:
    words = ["inspect", str(file), "--task-column", "image", "--missing", "skip"]
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file"] == {
        "path": str(file), "kind": "delimited text", "encoding": "utf-8-sig", "separator": ";",
        "first row": ["image", "worker", "label"], "no label": {"": 1, "skip": 1, "N/A": 1},
    }  # fmt: skip
    assert (found["items"], found["active"], found["annotations"]) == (3, 2, 4) and found["classes"] == {"x": 3, "y": 1}
    assert cli.main([*words, "--json", str(tmp_path / "out.json"), "--picture", str(tmp_path / "out.png")]) == 0
    assert json.loads((tmp_path / "out.json").read_text()) == found and capsys.readouterr().out == ""
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_terminal(file: Path, capsys) -> None:
    assert cli.main(["inspect", str(file), "--task-column", "image"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "delimited text", "empty (1), N/A (1)", "3 with labels of 3", "x, y", "Krippendorff's alpha", "Fleiss' kappa",
        "labels per annotator", "warning: 'skip' are read as classes: give --missing if", "Try soft-majority-vote",
    ):  # fmt: skip
        assert words in shown, words


def test_what_is_wrong_is_said_in_the_words_of_the_command(file: Path, capsys) -> None:
    assert cli.main(["inspect", str(file)]) == 2
    assert "no column 'task'" in (told := capsys.readouterr().err) and "--task-column 'image'" in told
    assert cli.main(["inspect", str(file), "--format", "xls"]) == 2
    assert "--format 'xls' is unknown" in capsys.readouterr().err
    assert cli.main(["inspect", str(file.parent / "none.csv")]) == 2
    assert "none.csv does not exist" in capsys.readouterr().err


def test_other_kinds_of_files(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"t1": {"u": "x", "v": "y"}, "t2": {"u": "x"}}))
    (tmp_path / "a.txt").write_text("0 1\n1 -1\n")
    (tmp_path / "names").write_text("a\nb\n")
    for words, kind, missing in (
        (["a.json"], "JSON", {}),
        (["a.json", "--format", "peerannot"], "export of peerannot", {}),
        (["a.txt", "--format", "dense", "--items", str(tmp_path / "names")], "delimited text", {"-1": 1}),
    ):
        assert cli.main(["inspect", str(tmp_path / words[0]), *words[1:], "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["file"]["kind"], found["file"]["no label"], found["annotations"]) == (kind, missing, 3)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["objectives"], ["train", "--help"]])
def test_a_reader_that_has_enough_is_no_error(words: list[str]) -> None:
    code = f"import sys\nfrom crowdnal import cli\nsys.exit(cli.main({words}))"
    process = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # as `| head` does when it has its lines
    assert process.stderr.read() == b"" and process.wait() == 141


def test_picture_of_very_many(capsys) -> None:
    many = {n: 5000 - n for n in range(1, 5000)}
    assert figures.crowd(many, many, {f"class {k}": k for k in range(100)}).startswith(b"\x89PNG")
    assert figures.crowd({}, {}, {}).startswith(b"\x89PNG")
